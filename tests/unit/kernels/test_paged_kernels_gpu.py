"""The kernels over a paged cache on a GPU: what the interpreter cannot show."""

from dataclasses import fields, replace

import pytest
import torch

from absorbed_mla.inference.backend import PagedRequest, choose
from absorbed_mla.inference.backends.reference import paged_reference
from absorbed_mla.inference.rows import Rows
from absorbed_mla.registry import PAGED_BACKENDS
from tests.support import needs
from tests.support.backends import determinism
from tests.support.gpu_calls import capture, on_streams
from tests.support.paged import PagedCase
from tests.unit.kernels.paged import (
    assert_chunks_have_the_same_bits,
    assert_equals_reference,
    assert_same_bits,
    training_operands,
)

pytestmark = needs.gpu

DEVICE = torch.device("cuda")
CASE = PagedCase(
    (1, 2, 0, 8),
    (5000, 333, 64, 777),
    heads=16,
    kv_lora_rank=512,
    rope=64,
    block_size=64,
    padding=3,
)
REQUEST = PagedRequest(DEVICE, torch.bfloat16, 16, 512, 64, 64)


@pytest.fixture(params=["triton", "hopper", "flash_mla", "reference"])
def backend(request):
    if reason := PAGED_BACKENDS[request.param].why_not(REQUEST):
        pytest.skip(reason)
    return PAGED_BACKENDS[request.param]


@pytest.fixture(autouse=True)
def _settings():
    """Without the suite's deterministic mode, in which PyTorch's own operators may wait."""
    with determinism(demanded=False):
        yield


def test_equals_the_reference(backend):
    inputs = CASE.inputs(DEVICE)
    assert_equals_reference(backend.forward(*inputs), inputs, lse_tolerance=2e-3)


def test_cuda_graph(backend):
    """Recorded with bounds, replayed with other queries, keys, tables and lengths."""
    shapes = replace(CASE, query_lengths=(4, 4, 4, 4), kv_lengths=(5000, 5000, 5000, 5000))
    recorded = shapes.inputs(DEVICE)
    recorded[2].nan_to_num_()
    *operands, rows, scale = recorded
    # Rows keep the tables that kernels derive from them: the graph makes its own.
    graph, found = capture(lambda: backend.forward(*operands, replace(rows), scale))
    for seed, lengths, kv_lengths in (
        (1, (4, 1, 4, 4), (4999, 1, 64, 700)),
        (2, (1, 0, 0, 2), (1, 0, 0, 2)),
        (3, (0, 4, 3, 1), (9, 5000, 4097, 2048)),
    ):
        others = replace(CASE, query_lengths=lengths, kv_lengths=kv_lengths).inputs(DEVICE, seed)
        _replace(recorded, others)
        graph.replay()
        torch.cuda.synchronize()
        assert_equals_reference(found, recorded, lse_tolerance=2e-3)


def _replace(recorded, others) -> None:
    """The contents of what was recorded by those of smaller inputs."""
    for old, new in zip(recorded[:3], others[:3]):
        old.fill_(torch.nan)
        old[: len(new)] = new
    for field in fields(Rows):
        old, new = getattr(recorded[3], field.name), getattr(others[3], field.name)
        if field.name == "block_table":
            old.fill_(0)
            old[:, : new.shape[1]] = new.clamp(max=len(recorded[2]) - 1)
        elif isinstance(old, torch.Tensor):
            old.copy_(new)


def test_streams(backend):
    """Calls side by side."""
    sets = [CASE.inputs(DEVICE, seed) for seed in range(4)]
    expected = [backend.forward(*inputs) for inputs in sets]
    for one, other in zip(on_streams(backend.forward, sets), expected):
        assert_same_bits(one, other)


def test_no_synchronisation(backend):
    inputs = CASE.inputs(DEVICE)
    backend.forward(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.forward(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_offsets_beyond_32_bits(backend):
    """A row of a million tokens in blocks at the end of a cache with 2**32 numbers."""
    blocks, keys = 2**17, 2**20
    cache = torch.zeros(blocks, 64, 576, dtype=torch.bfloat16, device=DEVICE)
    assert cache.numel() > 2**32
    latent = torch.randn(64, 576, device=DEVICE, dtype=torch.bfloat16)
    cache[-keys // 64 :] = latent
    table = torch.arange(blocks - keys // 64, blocks, dtype=torch.int32, device=DEVICE)[None]
    query = torch.randn(2, 16, 576, device=DEVICE, dtype=torch.bfloat16)
    inputs = (query[..., :512], query[..., 512:], cache)
    rows = Rows.of((2,), (keys,), table.flip(1))
    out, lse = backend.forward(*inputs, rows, 0.05)
    # Every block is the same: the last token sees them all, as often.
    short = Rows.of((2,), (64,), table[:, -1:])
    expected = paged_reference(*inputs, short, 0.05)
    torch.testing.assert_close(out[1], expected[0][1], atol=2e-2, rtol=2e-2)
    more = torch.log(torch.tensor(keys / 64.0))
    torch.testing.assert_close(lse[1], expected[1][1] + more.item(), atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("heads", [16, 128])
def test_training_and_decode_agree_to_the_bit(heads):
    """batch_invariant: the training forward, the whole prompt, and the last token alone."""
    from absorbed_mla.core_attention.backends.triton import ENTRY as TRITON
    from absorbed_mla.core_attention.masks.scores import ScoreRules
    from absorbed_mla.core_attention.masks.spans import Span
    from absorbed_mla.core_attention.types import AttentionInputs

    length = 1000
    case = replace(CASE, query_lengths=(length,), kv_lengths=(length,), heads=heads, padding=0)
    inputs = case.inputs(DEVICE)
    triton = choose("triton", replace(REQUEST, num_heads=heads, batch_invariant=True))

    def attend(inputs, batch_invariant):
        return triton.forward(*inputs, batch_invariant=batch_invariant)

    assert_chunks_have_the_same_bits(attend, inputs, ((0, 1), (1, 700), (700, 999), (999, 1000)))
    q_content, q_rope, latent, k_rope = training_operands(inputs)
    operands = AttentionInputs(q_content, q_rope, latent[:, :, None], k_rope, None)
    rules = ScoreRules(scale=case.scale, spans=(Span(0, length, 0, length, 0),))
    trained = TRITON.forward(operands, rules)
    whole = attend(inputs, batch_invariant=True)
    assert_same_bits((trained.out[:, 0], trained.lse[:, 0]), whole)
