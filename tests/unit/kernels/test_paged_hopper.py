"""The decode kernel for Hopper against the reference.

Without a GPU its source is run by PyTorch, which shows what it reads, writes and waits for, but not
what the compiler makes of it.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from absorbed_mla.core_attention.invariant_hopper import InvariantHopper
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.core_attention.max_logits import MaxLogits
from absorbed_mla.core_attention.types import AttentionInputs
from tests.support import needs
from tests.support.backends import triton_interpreter
from tests.support.combinations import thinned
from tests.support.gluon_emulation import emulated
from tests.support.hostile import poisoned_memory
from tests.support.paged import TWO_ROWS as OF_TWO_ROWS
from tests.support.paged import PagedCase, call_of, fp8_inputs
from tests.unit.kernels.paged import (
    DEVICE,
    ON_GPU,
    assert_chunks_have_the_same_bits,
    assert_equals_reference,
    assert_reads_lengths_from_the_device,
    assert_same_bits,
    training_operands,
)

pytestmark = pytest.mark.usefixtures("interpreted")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
if ON_GPU and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("it needs compute capability 9.0, or no GPU", allow_module_level=True)


def run(launcher, kernel: str, seed: int = 0, module: str | None = None):
    """Within, a launcher's kernel runs: on the GPU, or in PyTorch."""
    if ON_GPU:
        return contextlib.nullcontext()
    return emulated(launcher, f"attend_{kernel}", module or f"{kernel}_kernel", seed)


# Triton decides when a kernel is decorated: here those of the schedule and of combining splits.
with triton_interpreter():
    import absorbed_mla.kernels.paged.forward  # noqa: F401
    from absorbed_mla.core_attention.masks.tiles import query_tiles
    from absorbed_mla.inference.rows import Rows
    from absorbed_mla.kernels.hopper import decode, forward
    from absorbed_mla.kernels.hopper.pieces import PIECE as _PIECE
    from absorbed_mla.kernels.paged import plan
    from absorbed_mla.kernels.paged.combine import combine
    from absorbed_mla.kernels.paged.schedule import schedule

PIECE = _PIECE.value


def attend(inputs, window=(0, None), batch_invariant=False, num_splits=None, seed=0):
    call = call_of(inputs, window, batch_invariant=batch_invariant, num_splits=num_splits)
    with decode_kernels(call.fp8, seed), poisoned_memory():
        return decode.forward(call)


@contextlib.contextmanager
def decode_kernels(fp8: bool, seed: int):
    """Within, the launcher's kernels over rows in FP8, or over latents, run."""
    if fp8:
        with (
            run(decode, "fp8_decode", seed, "fp8_rows"),
            run(decode, "fp8_decode_pieces", seed),
            run(decode, "few_rows", seed),
        ):
            yield
    else:
        with run(decode, "decode", seed), run(decode, "decode_pieces", seed):
            yield


def check(case: PagedCase, **how) -> None:
    inputs, window = case.inputs(DEVICE), case.window or (0, None)
    assert_equals_reference(attend(inputs, window, **how), inputs, window)


MIXED = PagedCase((1, 3, 0, 5), (200, 3, 9, 150), 16, 64, 128, 32, padding=2)
TWO_ROWS = replace(OF_TWO_ROWS, block_size=64, kv_lora_rank=128, rope=32)
SHORT = replace(MIXED, query_lengths=(1, 2), kv_lengths=(130, 64))
CASES = {
    **{f"block_{size}": replace(MIXED, block_size=size) for size in (16, 48, 64, 1024)},
    **{f"heads_{heads}": replace(SHORT, heads=heads) for heads in (1, 8, 12, 128)},
    "one_block": replace(MIXED, block_size=350),
    "one_small_block": replace(MIXED, query_lengths=(1, 2), kv_lengths=(7, 21), block_size=21),
    "one_key": replace(MIXED, query_lengths=(1, 1), kv_lengths=(1, 1)),
    "whole_blocks": replace(MIXED, query_lengths=(1, 1), kv_lengths=(64, 192)),
    "prefill": replace(MIXED, query_lengths=(20, 2), kv_lengths=(100, 2), heads=8),
    "fp16": replace(MIXED, dtype=FP16),
    "huge": replace(MIXED, magnitude=100.0),
    "more_tokens_than_keys": replace(MIXED, query_lengths=(5, 2), kv_lengths=(3, 2)),
    # Four programs: each goes through several rows, and rows lie in several programs.
    "many_rows": replace(MIXED, query_lengths=(1,) * 9, kv_lengths=tuple(range(1, 500, 60))),
    "one_long_row": replace(MIXED, query_lengths=(1,) * 5, kv_lengths=(9, 9, 900, 9, 9)),
    "nothing_new": replace(MIXED, query_lengths=(0, 0), kv_lengths=(5, 70)),
    "width_512": replace(
        MIXED, query_lengths=(1, 2), kv_lengths=(140, 66), kv_lora_rank=512, rope=64
    ),
    "width_256": replace(
        MIXED, query_lengths=(1,), kv_lengths=(140,), block_size=16, kv_lora_rank=256
    ),
    "prefixes": replace(MIXED, query_lengths=(9, 0, 3, 1), heads=12, prefixes=4),
    **{f"two_rows_{heads}": replace(TWO_ROWS, heads=heads) for heads in (1, 16)},
    "window": replace(MIXED, window=(37, 140)),
    "window_behind_all": replace(MIXED, window=(200, None)),
    "window_empty": replace(MIXED, window=(64, 64)),
}


@pytest.mark.no_cover
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name):
    """Amid NaN in blocks and slots that it may not read, and blocks that are not there."""
    check(CASES[name])


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("name", "num_splits"),
    [("block_64", 1), ("block_64", 4), ("heads_12", 2), ("window", 4), ("prefixes", 4)]
    + [("two_rows_16", 1), ("two_rows_1", 4)]
    + [("heads_128", 2)] * ON_GPU,  # takes seconds where it is emulated
)
def test_splits(name, num_splits):
    """Of requests of one key, too: most of their splits are empty."""
    check(CASES[name], num_splits=num_splits)


def test_any_order():
    """Roles and copies may go on in any order: the result has the same bits."""
    inputs = replace(MIXED, query_lengths=(2,), kv_lengths=(350,)).inputs(DEVICE)
    expected = attend(inputs, num_splits=1)
    for seed in range(1, 4 if thinned() else 13):
        found = attend(inputs, num_splits=1, seed=seed)
        assert_same_bits(found, expected)


def test_any_order_of_several_tiles():
    """Likewise where a program goes on to a next tile while its last one is being written."""
    case = replace(MIXED, query_lengths=(1,) * 9, kv_lengths=(1, 1, 70, 1, 130, 1, 64, 200, 3))
    inputs = case.inputs(DEVICE)
    expected = attend(inputs)
    for seed in range(1, 2 if thinned() else 4):
        assert_same_bits(attend(inputs, seed=seed), expected)


def test_reads_no_entry_beyond_the_table():
    """Whose last row ends with the memory; the last keys do not fill what is loaded at a time."""
    q_content, q_rope, cache, rows, scale = replace(
        MIXED, query_lengths=(1, 2), kv_lengths=(70, 66), block_size=16
    ).inputs(DEVICE)
    exact = replace(rows, block_table=rows.block_table[:, :-1].contiguous())
    expected = attend((q_content, q_rope, cache, rows, scale))
    found = attend((q_content, q_rope, cache, exact, scale))
    assert_same_bits(found, expected)


def test_a_batch_that_grows_in_step():
    """As Megatron's static context keeps it: a block is an entry of the batch, token-major."""
    q_content, q_rope, cache, rows, scale = replace(
        MIXED, query_lengths=(1, 1, 1), kv_lengths=(90, 90, 90), block_size=96
    ).inputs(DEVICE)
    block = rows.block_table[:, 0].long()
    token_major = cache[block].transpose(0, 1).contiguous()
    table = torch.arange(3, device=DEVICE)[:, None]  # int64
    batch = replace(rows, block_table=table)
    found = attend((q_content, q_rope, token_major.transpose(0, 1), batch, scale))
    expected = attend((q_content, q_rope, cache, rows, scale))
    assert_same_bits(found, expected)


def test_lengths_come_from_the_device():
    assert_reads_lengths_from_the_device(attend, MIXED)


over = pytest.mark.parametrize(
    "inputs_of", [PagedCase.inputs, fp8_inputs], ids=["over_latents", "over_fp8_rows"]
)


class TestBatchInvariance:
    CASE = PagedCase((90,), (90,), 8, 64, 128, 32)

    @over
    def test_any_chunks(self, inputs_of):
        inputs = inputs_of(self.CASE, DEVICE)
        assert_chunks_have_the_same_bits(attend, inputs, ((0, 1), (1, 70), (89, 90)))

    def test_training_forward_gives_the_same_bits(self):
        """The same source, with another table and other copies."""
        inputs = self.CASE.inputs(DEVICE)
        tiles = query_tiles([Span(0, 90, 0, 90, 0)], 8, 90).to(DEVICE)
        operands = training_operands(inputs)
        with run(forward, "forward"):
            trained = forward.forward(*operands, tiles, self.CASE.scale)
        assert_same_bits([x[:, 0] for x in trained], attend(inputs, batch_invariant=True))

    def test_training_forward_records_the_largest_scores(self):
        inputs = self.CASE.inputs(DEVICE)
        tiles = query_tiles([Span(0, 90, 0, 90, 0)], 8, 90).to(DEVICE)
        operands = training_operands(inputs)
        largest = torch.empty(operands[0].shape[:3], device=DEVICE)
        with run(forward, "forward"), poisoned_memory():
            recorded = forward.forward(*operands, tiles, self.CASE.scale, largest)
            plain = forward.forward(*operands, tiles, self.CASE.scale)
        assert_same_bits(recorded, plain)
        qc, qr, latent, k_rope = (x.double() for x in operands)
        scores = torch.einsum("qbnc,kbc->qbnk", qc, latent)
        scores = (scores + torch.einsum("qbnr,kbr->qbnk", qr, k_rope)) * self.CASE.scale
        hidden = torch.ones(90, 90, dtype=torch.bool, device=DEVICE).triu(1)[:, None, None]
        expected = scores.masked_fill(hidden, -torch.inf).amax(-1)
        torch.testing.assert_close(largest.double(), expected, rtol=1e-5, atol=1e-5)


def test_pieces_are_combined_in_order():
    """One after the other, as a program adds them that goes through all; seen in fp32."""
    pieces, heads, width = 7, 16, 128
    tiles = plan.tiles_for(1, heads, 1, 1, 64)
    split_kv = plan.split_kv_for(tiles, 7 * 64, 64, 1, DEVICE, -1)
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    division = plan.Division(tiles, split_kv, 64, 7 * 64)
    table = schedule(0 * one, one, 7 * 64 * one, 0, division)
    make = torch.Generator().manual_seed(0)
    split_out = torch.randn(2 * pieces, 1, 64, width, generator=make).to(DEVICE)
    # Weights are powers of two: all that is rounded are sums.
    split_lse = torch.randint(-2, 3, (2 * pieces, 1, 64), generator=make).float().to(DEVICE)
    out, lse = torch.empty(1, heads, width, device=DEVICE), torch.empty(1, heads, device=DEVICE)
    lists = 0 * one, one
    combine(split_out, split_lse, table, tiles, split_kv, lists, (out, lse), in_order=True)
    top, total, added = torch.full((heads,), -torch.inf), torch.zeros(heads), torch.zeros(out.shape)
    for piece in range(pieces):
        place = 2 * piece + (piece == 0)
        bits, values = split_lse[place, 0, :heads].cpu(), split_out[place, 0, :heads].cpu()
        higher = torch.maximum(top, bits)
        decay, weight = torch.exp2(top - higher), torch.exp2(bits - higher)
        total, top = total * decay + weight, higher
        added = added * decay[:, None] + values * weight[:, None]
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if ON_GPU else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(out.cpu(), added / total[:, None], **tolerance)


# Tokens of a tile lie on both sides of the ends of the first and the second piece.
_LENGTHS = (4300, 2 * PIECE + 1, PIECE, PIECE + 2, 70)
IN_PIECES = PagedCase((1, 3, 1, 4, 2), _LENGTHS, 16, 64, 128, 32, padding=1)
ALONE = (1, 3) if thinned() else range(5)


def alone(inputs, number: int):
    """One of the requests of ``IN_PIECES``, and its tokens."""
    q_content, q_rope, cache, rows, scale = inputs
    lengths, keys = IN_PIECES.query_lengths, IN_PIECES.kv_lengths
    first = sum(lengths[:number])
    tokens = slice(first, first + lengths[number])
    row = Rows.of((lengths[number],), (keys[number],), rows.block_table[number][None])
    return (q_content[tokens], q_rope[tokens], cache, row, scale), tokens


class TestPieces:
    """Parity mode's pieces of keys, with a program each and one after the other in a program."""

    def test_equal_the_reference_and_those_of_one_request(self):
        inputs = IN_PIECES.inputs(DEVICE)
        whole = attend(inputs, batch_invariant=True)
        assert_equals_reference(whole, inputs)
        for number in ALONE:
            one, tokens = alone(inputs, number)
            assert_same_bits(attend(one, batch_invariant=True), [x[tokens] for x in whole])

    @over
    @pytest.mark.parametrize("seed", [1] if thinned() else [1, 2])
    def test_any_order(self, seed, inputs_of):
        """Roles may go on in any order, with several tiles of a program."""
        inputs = inputs_of(replace(IN_PIECES, query_lengths=(1,) * 5), DEVICE)
        expected = attend(inputs, batch_invariant=True)
        assert_same_bits(attend(inputs, batch_invariant=True, seed=seed), expected)

    @needs.no_gpu
    @over
    def test_the_ways_are_taken(self, inputs_of):
        """A program for each piece, and one for all: else equal bits would be those of one way."""
        inputs = inputs_of(IN_PIECES, DEVICE)
        for each, splits in ((inputs, 1), (alone(inputs, 0)[0], -PIECE // 64)):
            found = decode.divide(call_of(each, batch_invariant=True))
            assert found.split_kv.num_splits == splits

    def test_the_training_forward_gives_the_same_bits(self):
        """Of packed sequences at any key, in a batch; 0 and -inf for a token in none of them."""
        spans = [Span(1, 3, 5, 75, 68), Span(3, 6, 75, 75 + PIECE + 90, PIECE + 87)]
        keys = spans[-1].key_end
        make = torch.Generator().manual_seed(0)
        shapes = (6, 2, 8, 128), (6, 2, 8, 32), (keys, 2, 1, 128), (keys, 2, 32)
        operands = [torch.randn(s, generator=make).to(BF16).to(DEVICE) for s in shapes]
        q_content, q_rope, latent, k_rope = operands
        with decode_kernels(False, 0), poisoned_memory():
            rules = ScoreRules(0.1, Spans(spans))
            out, lse = InvariantHopper().forward(AttentionInputs(*operands, None), rules)
        assert not out[0].any() and (lse[0] == -torch.inf).all()
        largest = torch.full((8,), -torch.inf, device=DEVICE)
        recording = ScoreRules(0.1, Spans(spans), max_logits=MaxLogits(largest))
        with decode_kernels(False, 0), run(forward, "forward"):
            again = InvariantHopper().forward(AttentionInputs(*operands, None), recording)
        assert_same_bits((again.out, again.lse), (out, lse))
        assert largest.isfinite().all()
        for span, entry in itertools.product(spans, range(2)):
            kv = torch.cat((latent[span.keys, entry, 0], k_rope[span.keys, entry]), -1)
            cache = torch.nn.functional.pad(kv, (0, 0, 0, -len(kv) % 64)).unflatten(0, (-1, 64))
            table = torch.arange(len(cache), dtype=torch.int32, device=DEVICE)[None]
            row = Rows.of((span.num_queries,), (span.num_keys,), table)
            query = q_content[span.queries, entry], q_rope[span.queries, entry]
            expected = attend((*query, cache, row, 0.1), batch_invariant=True)
            assert_same_bits([x[span.queries, entry] for x in (out, lse)], expected)

    def test_one_piece_has_the_bits_of_no_pieces(self):
        """Of a request with few keys among others with many, and of the training forward."""
        inputs = IN_PIECES.inputs(DEVICE)
        one, _ = alone(inputs, 2)
        assert one[3].max_kv_length == PIECE
        found = attend(one, batch_invariant=True)
        assert_same_bits(found, attend(one, num_splits=1))


class TestRefused:
    def attend(self, cache=None, scale=None, case=MIXED):
        q_content, q_rope, given, rows, given_scale = case.inputs(DEVICE)
        cache = given if cache is None else cache
        attend((q_content, q_rope, cache, rows, given_scale if scale is None else scale))

    def test_a_block_size_of_too_small_pages(self):
        with pytest.raises(ValueError, match=r"multiple of 16 .* got .* 100, 160"):
            self.attend(case=replace(MIXED, block_size=100))

    def test_a_cache_that_cannot_be_loaded_as_it_lies(self):
        """It is not copied: that would be the whole cache, in every step."""
        odd = torch.zeros(9, 64, 161, dtype=BF16, device=DEVICE)[..., :160]
        with pytest.raises(ValueError, match=r"16 bytes apart; got .* 161, 1"):
            self.attend(cache=odd)

    def test_a_scale(self):
        with pytest.raises(ValueError, match="scale must be positive, got -1"):
            self.attend(scale=-1.0)
