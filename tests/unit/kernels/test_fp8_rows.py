"""Decode kernels for Hopper over rows in FP8; what they have in common is in test_paged_hopper.py.

Few rows of a request, where C is 512, have a kernel of their own. Without a GPU the kernels' source
is run by PyTorch, as there.
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
from tests.support.combinations import thinned, without
from tests.support.paged import PagedCase, call_of, fp8_inputs
from tests.unit.kernels.paged import (
    DEVICE,
    assert_chunks_have_the_same_bits,
    assert_equals_reference,
    assert_same_bits,
    decoded,
)
from tests.unit.kernels.test_paged_hopper import (
    ALONE,
    BF16,
    FP16,
    IN_PIECES,
    MIXED,
    PIECE,
    SHORT,
    TWO_ROWS,
    alone,
    attend,
    decode,
    decode_kernels,
)
from tests.unit.kernels.test_paged_hopper import CASES as OVER_LATENTS

pytestmark = pytest.mark.usefixtures("interpreted")
# Of the kernel for few rows.
FEW = PagedCase((1, 1, 0, 1), (200, 1, 9, 127), 16, 64, 512, 64, padding=2)
FOUR = replace(FEW, heads=4, padding=0)
COMMON = ("block_48", "block_64", "block_1024", "heads_12", "one_key", "fp16", "width_256")
COMMON += ("more_tokens_than_keys", "window", "window_behind_all")
CASES = {
    **{name: OVER_LATENTS[name] for name in COMMON},
    **{f"block_{size}": replace(MIXED, block_size=size) for size in (1, 100)},
    "heads_128": replace(SHORT, query_lengths=(1,), kv_lengths=(130,), heads=128),
    "many_rows": replace(MIXED, query_lengths=(1,) * 9, kv_lengths=tuple(range(1, 300, 35))),
    "width_512": replace(
        MIXED, query_lengths=(1, 2), kv_lengths=(140, 66), heads=64, kv_lora_rank=512, rope=64
    ),
    **{f"few_block_{size}": replace(FEW, block_size=size) for size in (16, 48, 64, 1024)},
    "few_heads_12": replace(FEW, heads=12),
    "few_heads_20": replace(FEW, query_lengths=(1, 1), kv_lengths=(130, 64), heads=20),
    "few_tokens_16": replace(FEW, query_lengths=(3, 4, 1), kv_lengths=(70, 4, 66), heads=3),
    "few_tokens_32": replace(FEW, query_lengths=(1, 2), kv_lengths=(140, 66)),
    "few_more_tokens_than_keys": replace(FEW, query_lengths=(5, 2), kv_lengths=(3, 2), heads=2),
    "few_rope_16": replace(FEW, query_lengths=(1, 1), kv_lengths=(65, 64), rope=16),
    "few_huge": replace(FEW, query_lengths=(1,), kv_lengths=(200,), magnitude=100.0),
    # Four programs: each goes through several rows, and rows lie in several programs.
    "few_many_rows": replace(FOUR, query_lengths=(1,) * 9, kv_lengths=tuple(range(1, 300, 35))),
    "few_long_and_short": replace(
        FOUR, query_lengths=(1,) * 7, kv_lengths=(3, 700, 65, 1, 450, 128, 191)
    ),
    "few_prefixes": replace(
        FEW, query_lengths=(3, 4, 1), kv_lengths=(70, 4, 66), heads=3, prefixes=3
    ),
    **{name: OVER_LATENTS[name] for name in ("two_rows_16",)},
    "few_two_rows": replace(TWO_ROWS, heads=2, kv_lora_rank=512, rope=64),
    "few_window": replace(FEW, window=(37, 140)),
}


@pytest.fixture
def rows(monkeypatch) -> list[int]:
    """Of the tiles of all launches of the kernel for few rows."""
    found: list[int] = []
    launch = decode._launch

    def record(kernel, *args):
        found.extend([args[-1]["ROWS"]] if "ROWS" in args[-1] else [])
        launch(kernel, *args)

    monkeypatch.setattr(decode, "_launch", record)
    return found


def check(case: PagedCase, **how) -> None:
    """Against the reference over the same, exact, latents."""
    inputs, window = fp8_inputs(case, DEVICE), case.window or (0, None)
    assert_equals_reference(attend(inputs, window, **how), decoded(inputs, torch.float64), window)


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "name",
    without(
        CASES, "block_48", "block_64", "heads_12", "more_tokens_than_keys", "window", "one_key"
    ),
)
def test_equals_the_reference(name, rows):
    """Amid NaN, and blocks that are not there."""
    check(CASES[name])
    of_tile = 32 if name in ("few_heads_20", "few_tokens_32") else 16
    assert rows == ([of_tile] if name.startswith("few") else [])


@pytest.mark.no_cover
@pytest.mark.parametrize("num_splits", [1, 2, 4])
def test_splits(num_splits):
    """Of requests of one key, too: most of their splits are empty."""
    check(FEW, num_splits=num_splits)


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


def test_values_of_few_rows_have_the_bits_of_decoded_ones(rows):
    """A token that sees one key returns it; of any magnitude, and any value that there is."""
    count = 24
    case = PagedCase((1,) * count, (1,) * count, 2, 16, 512, 64)
    q_content, q_rope, cache, batch, scale = fp8_inputs(case, DEVICE)
    parts = Fp8Latents(512, 64).parts(cache)
    block = batch.block_table[:, 0].long()
    # Every byte but the two that are NaN.
    bits = [x for x in range(256) if x & 0x7F != 0x7F]
    values = torch.tensor(bits + bits + [0, 1, 2, 3], dtype=torch.uint8, device=DEVICE)
    make = torch.Generator().manual_seed(0)
    for request in range(count):
        order = torch.randperm(512, generator=make).to(DEVICE)
        parts.values[block[request], 0] = values[order]
    exponents = torch.linspace(-100, 100, count * 4).reshape(count, 4)
    scales = torch.rand(count, 4, generator=make) + torch.exp2(exponents)
    parts.scales[block, 0] = scales.to(DEVICE)
    q_content.zero_()
    out, _ = attend((q_content, q_rope, cache, batch, scale), num_splits=1)
    expected = Fp8Latents(512, 64).decode(cache[block, 0], case.dtype)[:, None, :512]
    assert torch.equal(out, expected.expand_as(out))
    assert rows == [16]


@pytest.mark.parametrize("case", [MIXED, FEW, replace(FEW, heads=32)], ids=["64", "16", "32"])
def test_any_order(case):
    """Roles and copies may go on in any order, from tile to tile, too: the bits are the same."""
    inputs = fp8_inputs(replace(case, query_lengths=(1,) * 3, kv_lengths=(1, 350, 64)), DEVICE)
    expected = attend(inputs, num_splits=1)
    for seed in range(1, 3 if thinned() else 7):
        assert_same_bits(attend(inputs, num_splits=1, seed=seed), expected)


NAMES = ("few_block_64", "few_many_rows", "few_window", "few_long_and_short")
ASKED_FOR = [(name, (64, 128)[i % 2]) for i, name in enumerate(NAMES)]
ASKED_FOR += [(name, (128, 64)[i % 2]) for i, name in enumerate(NAMES) if not thinned()]


@pytest.mark.parametrize(
    "case",
    [PagedCase((1,), (90,), 8, 64, 128, 32)]
    + [replace(CASES[name], block_size=size) for name, size in ASKED_FOR],
    ids=["rows_of_64", *(f"{name}-{size}" for name, size in ASKED_FOR)],
)
def test_rows_together_and_apart(case):
    """Where nothing lies between rows they are asked for ahead; the result has the same bits.

    Also where a program goes from row to row, begins within one, or has one without keys; amid
    blocks that are not there, which it may not ask for.
    """
    q_content, q_rope, cache, batch, scale = fp8_inputs(case, DEVICE)
    together, window = cache.contiguous(), case.window or (0, None)
    assert cache.stride(1) > cache.shape[2] == together.stride(1)
    found = attend((q_content, q_rope, together, batch, scale), window)
    assert_same_bits(found, attend((q_content, q_rope, cache, batch, scale), window))


def test_few_rows_that_their_kernel_cannot_take(rows):
    """Parity mode, where it would depend on the number of tokens; fp16; blocks of odd sizes."""
    inputs = fp8_inputs(replace(FOUR, query_lengths=(6,), kv_lengths=(6,)), DEVICE)
    assert_chunks_have_the_same_bits(attend, inputs, ((0, 1), (2, 6)))
    for change in ({"dtype": FP16}, {"block_size": 20}, {"heads": 33}):
        check(replace(FEW, query_lengths=(1,), kv_lengths=(30,), **change))
    assert rows == []


def test_parity_mode_of_few_rows():
    """Their own kernel sums in another order, so that it is not taken."""
    inputs = fp8_inputs(PagedCase((1,), (130,), 16, 64, 512, 64), DEVICE)
    few, whole = (
        decode.divide(call_of(inputs, batch_invariant=batch_invariant)).tiles
        for batch_invariant in (False, True)
    )
    assert (few.heads * few.tokens, whole.heads * whole.tokens) == (16, 64)
    expected = attend(decoded(inputs, BF16), batch_invariant=True)
    assert_same_bits(attend(inputs, batch_invariant=True), expected)


class TestPieces:
    """Parity mode's pieces of keys: the bits are those over decoded latents, and of training."""

    def test_of_one_request_and_of_many(self):
        """With a program for each piece, and one for all."""
        inputs = fp8_inputs(IN_PIECES, DEVICE)
        expected = attend(decoded(inputs, BF16), batch_invariant=True)
        assert_same_bits(attend(inputs, batch_invariant=True), expected)
        for number in ALONE:
            one, tokens = alone(inputs, number)
            assert_same_bits(attend(one, batch_invariant=True), [x[tokens] for x in expected])

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


def test_a_cache_that_cannot_be_loaded_as_it_lies():
    q_content, q_rope, cache, rows, scale = fp8_inputs(MIXED, DEVICE)
    odd = torch.zeros(*cache.shape[:2], cache.shape[2] + 4, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match=r"FP8 rows .* multiples of 16 bytes apart; got"):
        attend((q_content, q_rope, odd[..., :-4], rows, scale))
