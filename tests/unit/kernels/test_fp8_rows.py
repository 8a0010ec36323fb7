"""The decode kernel for Hopper over rows in FP8; what it has in common is in test_paged_hopper.py.

Few rows of the widths here have a kernel of their own where C is 512 (test_few_rows.py).

Without a GPU its source is run by PyTorch, as there.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from absorbed_mla.core_attention.invariant_hopper import InvariantHopper
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.core_attention.types import AttentionInputs
from absorbed_mla.fp8_latents import Fp8Latents
from absorbed_mla.inference.rows import Rows
from tests.support.backends import triton_interpreter
from tests.support.paged import PagedCase, call_of, fp8_inputs
from tests.unit.kernels.paged import (
    DEVICE,
    assert_chunks_have_the_same_bits,
    assert_equals_reference,
    assert_same_bits,
    decoded,
)
from tests.unit.kernels.test_paged_hopper import (
    BF16,
    FP16,
    IN_PIECES,
    MIXED,
    PIECE,
    SHORT,
    alone,
    assert_ways_are_taken,
    attend,
    decode,
    decode_kernels,
)

CASES = {
    **{f"block_{size}": replace(MIXED, block_size=size) for size in (1, 48, 64, 100, 1024)},
    "heads_12": replace(SHORT, heads=12),
    "heads_128": replace(SHORT, query_lengths=(1,), kv_lengths=(130,), heads=128),
    "one_key": replace(MIXED, query_lengths=(1, 1), kv_lengths=(1, 1)),
    "fp16": replace(MIXED, dtype=FP16),
    "more_tokens_than_keys": replace(MIXED, query_lengths=(5, 2), kv_lengths=(3, 2)),
    "many_rows": replace(MIXED, query_lengths=(1,) * 9, kv_lengths=tuple(range(1, 300, 35))),
    "width_512": replace(
        MIXED, query_lengths=(1, 2), kv_lengths=(140, 66), heads=64, kv_lora_rank=512, rope=64
    ),
    "width_256": replace(
        MIXED, query_lengths=(1,), kv_lengths=(140,), block_size=16, kv_lora_rank=256
    ),
    "window": replace(MIXED, window=(37, 140)),
    "window_behind_all": replace(MIXED, window=(200, None)),
}


@pytest.fixture(autouse=True)
def _interpreted():
    with triton_interpreter():
        yield


@pytest.mark.no_cover
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name):
    """Over the same, exact, latents; amid NaN, and blocks that are not there."""
    case = CASES[name]
    inputs, window = fp8_inputs(case, DEVICE), case.window or (0, None)
    assert_equals_reference(attend(inputs, window), decoded(inputs, torch.float64), window)


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("name", "num_splits"), [("heads_12", 2), ("block_48", 1), ("fp16", 1), ("width_512", 1)]
)
def test_same_bits_as_over_decoded_latents(name, num_splits):
    """Those of the kernel that reads what the rows are decoded to, of any magnitude."""
    case = CASES[name]
    q_content, q_rope, cache, *rest = case.inputs(DEVICE)
    magnitudes = torch.logspace(-30, 0, cache.shape[0], device=DEVICE)[:, None, None]
    cache *= magnitudes.to(cache.dtype)
    inputs = fp8_inputs(case, DEVICE, (q_content, q_rope, cache, *rest))
    expected = attend(decoded(inputs, case.dtype), num_splits=num_splits)
    assert_same_bits(attend(inputs, num_splits=num_splits), expected)


def test_any_order():
    """Roles may go on in any order, from tile to tile, too: the result has the same bits."""
    case = replace(MIXED, query_lengths=(1,) * 3, kv_lengths=(1, 350, 64))
    inputs = fp8_inputs(case, DEVICE)
    expected = attend(inputs, num_splits=1)
    for seed in range(1, 9):
        assert_same_bits(attend(inputs, num_splits=1, seed=seed), expected)


def test_parity_mode():
    """Parts of a prompt have the bits of all of it."""
    case = replace(MIXED, query_lengths=(70,), kv_lengths=(70,), heads=8, padding=0)
    inputs = fp8_inputs(case, DEVICE)
    assert_chunks_have_the_same_bits(attend, inputs, ((0, 1), (66, 70)))


class TestPieces:
    """Parity mode's pieces of keys: the bits are those over decoded latents, and of training."""

    def test_of_one_request_and_of_many(self):
        """With a program for each piece, and one for all."""
        inputs = fp8_inputs(IN_PIECES, DEVICE)
        assert_ways_are_taken(inputs)
        expected = attend(decoded(inputs, BF16), batch_invariant=True)
        assert_same_bits(attend(inputs, batch_invariant=True), expected)
        for number in range(len(IN_PIECES.kv_lengths)):
            one, tokens = alone(inputs, number)
            assert_same_bits(attend(one, batch_invariant=True), [x[tokens] for x in expected])

    @pytest.mark.parametrize("seed", [1, 2])
    def test_any_order(self, seed):
        """Roles may go on in any order, with several tiles of a program."""
        case = replace(IN_PIECES, query_lengths=(1,) * 5)
        inputs = fp8_inputs(case, DEVICE)
        expected = attend(inputs, batch_invariant=True)
        assert_same_bits(attend(inputs, batch_invariant=True, seed=seed), expected)

    def test_blocks_of_any_size(self):
        """Keys of a block of 64 lie in several blocks of the cache."""
        case = replace(IN_PIECES, query_lengths=(1, 3), kv_lengths=(90, PIECE + 100), padding=0)
        expected = attend(fp8_inputs(case, DEVICE), batch_invariant=True)
        found = attend(fp8_inputs(replace(case, block_size=100), DEVICE), batch_invariant=True)
        assert_same_bits(found, expected)

    def test_training_forward_gives_the_same_bits(self):
        """Over latents that were rounded and read again, as a layer trains on cached ones."""
        latents, keys, queries = Fp8Latents(128, 32), PIECE + 90, 3
        make = torch.Generator().manual_seed(0)
        shapes = (queries, 1, 16, 128), (queries, 1, 16, 32), (keys, 1, 160)
        *query, kv = (torch.randn(s, generator=make).to(BF16).to(DEVICE) for s in shapes)
        latent, k_rope = latents.rounded(kv).split((128, 32), -1)
        span = Span(0, queries, 0, keys, keys - queries)
        inputs = AttentionInputs(*query, latent[:, :, None], k_rope, None)
        with decode_kernels(False, 0):
            trained = InvariantHopper().forward(inputs, ScoreRules(0.1, Spans([span])))
        rows = torch.nn.functional.pad(latents.encode(kv[:, 0]), (0, 0, 0, -keys % 64))
        cache = rows.unflatten(0, (-1, 64))
        table = torch.arange(len(cache), dtype=torch.int32, device=DEVICE)[None]
        batch = *(x[:, 0] for x in query), cache, Rows.of((queries,), (keys,), table), 0.1
        found = attend(batch, batch_invariant=True)
        assert_same_bits(found, [x[:, 0] for x in (trained.out, trained.lse)])


def test_parity_mode_of_few_rows():
    """Their own kernel sums in another order, so that it is not taken."""
    case = PagedCase((1,), (130,), 16, 64, 512, 64)
    inputs = fp8_inputs(case, DEVICE)
    few, whole = (
        decode.divide(call_of(inputs, batch_invariant=batch_invariant)).tiles
        for batch_invariant in (False, True)
    )
    assert (few.heads * few.tokens, whole.heads * whole.tokens) == (16, 64)
    expected = attend(decoded(inputs, BF16), batch_invariant=True)
    assert_same_bits(attend(inputs, batch_invariant=True), expected)


def test_rows_together_and_apart():
    """Where nothing lies between rows they are asked for ahead; the result has the same bits."""
    case = PagedCase((1,), (90,), 8, 64, 128, 32)
    q_content, q_rope, cache, rows, scale = fp8_inputs(case, DEVICE)
    together = cache.contiguous()
    assert cache.stride(1) > cache.shape[2] == together.stride(1)
    found = attend((q_content, q_rope, together, rows, scale))
    assert_same_bits(found, attend((q_content, q_rope, cache, rows, scale)))


def test_a_cache_that_cannot_be_loaded_as_it_lies():
    q_content, q_rope, cache, rows, scale = fp8_inputs(MIXED, DEVICE)
    odd = torch.zeros(*cache.shape[:2], cache.shape[2] + 4, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match=r"FP8 rows .* multiples of 16 bytes apart; got"):
        attend((q_content, q_rope, odd[..., :-4], rows, scale))
