"""The decode kernel for Hopper on a GPU: long rows, full widths, races."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support import needs

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip(needs.NEEDS_HOPPER, allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")

from absorbed_mla.core_attention.invariant_hopper import InvariantHopper
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.core_attention.masks.tiles import query_tiles
from absorbed_mla.core_attention.types import AttentionInputs
from absorbed_mla.fp8_latents import Fp8Latents
from absorbed_mla.inference.rows import Rows
from absorbed_mla.kernels.hopper import forward
from absorbed_mla.kernels.hopper.tile import tile_shape
from tests.support.paged import PagedCase, fp8_inputs
from tests.unit.kernels.paged import (
    DEVICE,
    assert_chunks_have_the_same_bits,
    assert_equals_reference,
    assert_same_bits,
    decoded,
    training_operands,
)
from tests.unit.kernels.test_paged_hopper import FP16, PIECE, attend, check

DEEP = PagedCase((1, 2, 0, 8), (5000, 333, 64, 777), 16, 64, 512, 64, padding=3)


def behind_prefixes(case: PagedCase, new: int) -> PagedCase:
    """Rows of so many tokens: 40 behind one prefix, 9 behind another, and 21 behind none."""
    return replace(
        case,
        query_lengths=(40 * new, 9 * new, *(new,) * 70),
        kv_lengths=(5000, 333, *range(new, 1400 + new, 20)),
        starts=(0, 40 * new, *range(0, 70 * new, new)),
        prefixes=2,
    )


CASES = {
    **{f"heads_{heads}": replace(DEEP, heads=heads) for heads in (1, 8, 24, 32, 40, 64, 128)},
    **{f"block_{size}": replace(DEEP, block_size=size) for size in (16, 32, 48, 256, 8192)},
    "decode": replace(DEEP, query_lengths=(1, 1, 0, 1)),
    "decode_128": replace(DEEP, query_lengths=(1, 1, 0, 1), heads=128),
    "prefill": replace(DEEP, query_lengths=(300, 2, 0, 500)),
    "fp16": replace(DEEP, dtype=FP16),
    "many_rows": replace(DEEP, query_lengths=(1,) * 300, kv_lengths=tuple(range(1, 301))),
    "one_long_row": replace(DEEP, query_lengths=(1,) * 70, kv_lengths=(65,) * 69 + (40000,)),
    "rows_of_any_length": replace(
        DEEP, query_lengths=(1,) * 150, kv_lengths=tuple(range(1, 6000, 40)), heads=128
    ),
    "window": replace(DEEP, window=(70, 4000)),
    **{
        f"behind_prefixes_{heads}_{new}": behind_prefixes(replace(DEEP, heads=heads), new)
        for heads, new in ((16, 1), (16, 3), (64, 1), (128, 2))
    },
    "width_256": replace(DEEP, kv_lora_rank=256, block_size=16),
    "width_128": replace(DEEP, kv_lora_rank=128, rope=32, block_size=32),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_splits", [None, 1, 5])
def test_equals_the_reference(name, num_splits):
    check(CASES[name], num_splits=num_splits)


@pytest.mark.parametrize(
    "name", ["heads_128", "block_16", "decode", "rows_of_any_length", "behind_prefixes_16_1"]
)
def test_same_bits_in_every_run(name):
    """A race would show: parts are merged in order, and nothing is added up by atomics."""
    inputs = CASES[name].inputs(DEVICE)
    expected = attend(inputs)
    for _ in range(50):
        assert_same_bits(attend(inputs), expected)


@pytest.mark.parametrize("heads", [16, 128])
def test_training_and_decode_agree_to_the_bit(heads):
    """batch_invariant: the training forward, the whole prompt, and parts of it alone."""
    length = 1000
    case = replace(DEEP, query_lengths=(length,), kv_lengths=(length,), heads=heads, padding=0)
    inputs = case.inputs(DEVICE)
    assert_chunks_have_the_same_bits(attend, inputs, ((0, 1), (1, 700), (700, 999), (999, 1000)))
    tiles = query_tiles([Span(0, length, 0, length, 0)], tile_shape(heads)[0], length)
    trained = forward.forward(*training_operands(inputs), tiles.to(DEVICE), case.scale)
    assert_same_bits([x[:, 0] for x in trained], attend(inputs, batch_invariant=True))


over = pytest.mark.parametrize("fp8", [False, True], ids=["over_latents", "over_fp8_rows"])
PIECES = replace(
    DEEP,
    query_lengths=(1, 3, 70, 1, 1),
    kv_lengths=(9000, 2 * PIECE + 1, PIECE + 30, PIECE, 20),
    heads=128,
)


@pytest.mark.parametrize(
    "case",
    [
        PIECES,
        *(replace(PIECES, heads=heads) for heads in (16, 24, 64)),
        replace(PIECES, dtype=FP16),
    ],
    ids=["heads_128", "heads_16", "heads_24", "heads_64", "fp16"],
)
@over
def test_pieces_of_one_request_and_of_many(case, fp8):
    """In parity mode: each piece by a program of its own, and all by one program."""
    inputs = fp8_inputs(case, DEVICE) if fp8 else case.inputs(DEVICE)
    found = attend(inputs, batch_invariant=True)
    if fp8:
        assert_equals_reference(found, decoded(inputs, torch.float64), lse_tolerance=2e-3)
        assert_same_bits(found, attend(decoded(inputs, case.dtype), batch_invariant=True))
    else:
        assert_equals_reference(found, inputs)
    times = 60
    whole = attend(repeated(inputs, case, times), batch_invariant=True)
    expected = [x.expand(times, *x.shape) for x in one_by_one(inputs, case)]
    assert_same_bits([x.view(y.shape) for x, y in zip(whole, expected)], expected)


def repeated(inputs, case, times):
    """So many rows that programs go through tiles from beginning to end."""
    q_content, q_rope, cache, rows, scale = inputs
    lengths = times * case.query_lengths, times * case.kv_lengths
    many = Rows.of(*lengths, rows.block_table.repeat(times, 1))
    tokens = sum(case.query_lengths)
    query = [x[:tokens].repeat(times, 1, 1) for x in (q_content, q_rope)]
    return *query, cache, many, scale


def one_by_one(inputs, case):
    """In parity mode each request in a batch of its own, the results one after the other."""
    q_content, q_rope, cache, rows, scale = inputs
    found, start = [], 0
    for number, (length, keys) in enumerate(zip(case.query_lengths, case.kv_lengths)):
        query = [x[start : start + length] for x in (q_content, q_rope)]
        one = Rows.of((length,), (keys,), rows.block_table[number][None])
        found.append(attend((*query, cache, one, scale), batch_invariant=True))
        start += length
    return [torch.cat(parts) for parts in zip(*found)]


@pytest.mark.parametrize("heads", [16, 64, 128])
@over
def test_training_in_pieces_and_decode_agree_to_the_bit(heads, fp8):
    """Of a pack of a long sequence and a short one, and of parts of these alone and together."""
    lengths = 5000, PIECE - 8
    case = replace(DEEP, query_lengths=lengths, kv_lengths=lengths, heads=heads, padding=0)
    q_content, q_rope, cache, rows, scale = inputs = case.inputs(DEVICE)
    kv = [
        cache[rows.block_table[i, : -(-n // 64)].long()].flatten(0, 1)[:n]
        for i, n in enumerate(lengths)
    ]
    kv = torch.cat(kv)[:, None]
    if fp8:  # as a layer trains on what the cache returns
        kv, cache = Fp8Latents(512, 64).rounded(kv), fp8_inputs(case, DEVICE, inputs)[2]
    latent, k_rope = kv.split((512, 64), -1)
    spans = [Span(0, lengths[0], 0, lengths[0], 0)]
    spans += [Span(lengths[0], sum(lengths), lengths[0], sum(lengths), 0)]
    operands = q_content[:, None], q_rope[:, None], latent[:, :, None], k_rope, None
    trained = InvariantHopper().forward(AttentionInputs(*operands), ScoreRules(scale, Spans(spans)))

    def check_parts(*parts: tuple[int, int, int]) -> None:
        """Some tokens of these sequences, in one batch."""
        tokens = [torch.arange(n * lengths[0] + a, n * lengths[0] + b) for n, a, b in parts]
        new, seen = [b - a for _, a, b in parts], [b for _, _, b in parts]
        batch = Rows.of(new, seen, rows.block_table[[n for n, _, _ in parts]])
        chosen = torch.cat(tokens).to(DEVICE)
        query = q_content[chosen], q_rope[chosen]
        found = attend((*query, cache, batch, scale), batch_invariant=True)
        assert_same_bits(found, [x[chosen, 0] for x in (trained.out, trained.lse)])

    # Prefill, whole and in chunks.
    check_parts((0, 0, lengths[0]), (1, 0, lengths[1]))
    for part in ((0, 0, 1), (0, 1, 2300), (0, 2300, lengths[0]), (1, 0, lengths[1] - 1)):
        check_parts(part)
    # Decode: alone, and so many that programs go through all pieces of a tile.
    for end in (lengths[0], 4097, PIECE + 1, PIECE):
        check_parts((0, end - 1, end))
    check_parts((1, lengths[1] - 1, lengths[1]))
    check_parts(*((end % 2, end - 1, end) for end in range(1000, PIECE - 8, 3)))
    check_parts(*((0, end - 1, end) for end in range(PIECE, lengths[0], 7)))


def test_the_static_context_at_its_size():
    """Blocks of 32768 positions, one after the other in memory by position, not by block."""
    batch, positions, keys = 32, 32768, 5001
    cache = torch.full((positions, batch, 576), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    cache[:keys] = torch.randn(keys, batch, 576, device=DEVICE)
    query = torch.randn(batch, 16, 576, dtype=torch.bfloat16, device=DEVICE)
    table = torch.arange(batch, dtype=torch.int32, device=DEVICE)[:, None]
    rows = Rows.of((1,) * batch, (keys,) * batch, table)
    found = attend((query[..., :512], query[..., 512:], cache.transpose(0, 1), rows, 0.05))
    scores = torch.einsum("bnd,kbd->bnk", query.float(), cache[:keys].float()) * 0.05
    expected = torch.einsum("bnk,kbd->bnd", scores.softmax(-1), cache[:keys, :, :512].float())
    assert (found[0].float() - expected).norm() < 2**-7 * expected.norm()
    torch.testing.assert_close(found[1], scores.logsumexp(-1), atol=2e-3, rtol=1e-4)


FP8_CASES = {
    name: CASES[name]
    for name in (
        *("heads_1", "heads_24", "heads_128", "block_16", "block_48", "block_8192", "decode"),
        *("decode_128", "prefill", "fp16", "many_rows", "one_long_row", "rows_of_any_length"),
        *("window", "width_256", "width_128", "behind_prefixes_16_3", "behind_prefixes_128_2"),
    )
}


class TestFp8Rows:
    """Over rows of a cache in FP8, see test_fp8_rows.py."""

    @pytest.mark.parametrize("name", FP8_CASES)
    def test_equals_the_reference(self, name):
        case = FP8_CASES[name]
        inputs, window = fp8_inputs(case, DEVICE), case.window or (0, None)
        found, expected = attend(inputs, window), decoded(inputs, torch.float64)
        assert_equals_reference(found, expected, window, lse_tolerance=2e-3)

    @pytest.mark.parametrize("together", [True, False])
    @pytest.mark.parametrize("name", FP8_CASES)
    def test_bits_of_decoded_latents(self, name, together):
        """In every run: a race would show."""
        case = FP8_CASES[name]
        if case.block_size % 16:
            pytest.skip("the kernel for decoded latents does not take it")
        q_content, q_rope, cache, rows, scale = fp8_inputs(case, DEVICE)
        window = case.window or (0, None)
        inputs = q_content, q_rope, cache.contiguous() if together else cache, rows, scale
        # The kernel for few rows sums in another order.
        few = case.heads * max(case.query_lengths) <= 32 and case.dtype != FP16
        expected = attend(inputs if few else decoded(inputs, case.dtype), window)
        for _ in range(10):
            assert_same_bits(attend(inputs, window), expected)

    @pytest.mark.parametrize("heads", [16, 128])
    def test_parity_mode(self, heads):
        case = replace(DEEP, query_lengths=(1000,), kv_lengths=(1000,), heads=heads, padding=0)
        inputs = fp8_inputs(case, DEVICE)
        chunks = ((0, 1), (1, 700), (999, 1000))
        assert_chunks_have_the_same_bits(attend, inputs, chunks)
        decoded_inputs = decoded(inputs, case.dtype)
        expected = attend(decoded_inputs, batch_invariant=True)
        assert_same_bits(attend(inputs, batch_invariant=True), expected)

    def test_rows_beyond_32_bits(self):
        """A cache of more than 2**32 bytes, of which a request has the end."""
        blocks, keys = 110_000, 4096
        cache = torch.zeros(blocks, 64, 656, dtype=torch.uint8, device=DEVICE)
        assert cache.numel() > 2**32
        few = replace(DEEP, query_lengths=(1,), kv_lengths=(keys,), padding=0)
        q_content, q_rope, held, rows, scale = fp8_inputs(few, DEVICE)
        used = rows.block_table[0, : keys // 64].long()
        cache[-len(used) :] = held[used]
        table = torch.arange(blocks - len(used), blocks, dtype=torch.int32, device=DEVICE)[None]
        found = attend((q_content, q_rope, cache, replace(rows, block_table=table), scale))
        assert_same_bits(found, attend((q_content, q_rope, held, rows, scale)))
