"""The kernels over a paged latent cache against the reference.

Without a GPU they run in Triton's interpreter, on the same blocks.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.merge import merge
from absorbed_mla.inference.backends.reference import paged_reference
from absorbed_mla.inference.rows import Rows
from tests.support.backends import multiply_in_one_order, triton_interpreter
from tests.support.hostile import poisoned_memory
from tests.support.paged import TWO_ROWS, PagedCase, call_of
from tests.unit.kernels.paged import (
    DEVICE,
    ON_GPU,
    assert_equals_reference,
    assert_reads_lengths_from_the_device,
    assert_same_bits,
    training_operands,
)

pytestmark = pytest.mark.usefixtures("interpreted")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# Triton decides when a kernel is decorated.
with triton_interpreter():
    import absorbed_mla.kernels.paged.forward  # noqa: F401
    from absorbed_mla.core_attention.masks.tiles import query_tiles
    from absorbed_mla.inference.backends.triton import ENTRY as TRITON
    from absorbed_mla.kernels import operators
    from absorbed_mla.kernels.paged import plan
    from absorbed_mla.kernels.paged.combine import places
    from absorbed_mla.kernels.paged.padding import clear_padding
    from absorbed_mla.kernels.paged.schedule import Schedule, schedule
    from absorbed_mla.kernels.triton.launch import launch_for


def attend(inputs, window=(0, None), batch_invariant=False, num_splits=None):
    """Output and LSE by the kernels."""
    how = {"batch_invariant": batch_invariant, "num_splits": num_splits}
    return operators.paged_attention_forward(*call_of(inputs, window, **how))


def check(case: PagedCase, **how) -> None:
    inputs, window = case.inputs(DEVICE), case.window or (0, None)
    with poisoned_memory():
        found = attend(inputs, window, **how)
    assert_equals_reference(found, inputs, window)


MIXED = PagedCase((1, 3, 0, 5), (70, 3, 9, 150), padding=2)
DECODE = PagedCase((1, 1, 0, 1), (70, 1, 0, 150), heads=16, padding=1)
CASES = {
    **{f"block_{size}": replace(MIXED, block_size=size) for size in (1, 16, 64, 100, 128)},
    **{f"heads_{heads}": replace(MIXED, heads=heads) for heads in (1, 8, 40, 128)},
    **{f"decode_{heads}": replace(DECODE, heads=heads) for heads in (3, 16, 40)},
    "one_key": PagedCase((1, 1), (1, 1)),
    "fp16": replace(MIXED, dtype=FP16, heads=16),
    "fp32": PagedCase((1, 2), (37, 18), dtype=FP32, heads=2, kv_lora_rank=16),
    "no_rope": replace(MIXED, rope=0),
    "huge": replace(MIXED, magnitude=100.0),
    "tiny": replace(MIXED, magnitude=1e-6),
    "more_tokens_than_keys": PagedCase((5, 2), (3, 2)),
    "long": PagedCase((1, 2), (90, 460), heads=2, block_size=16),
    "nothing_new": PagedCase((0, 0), (5, 70), padding=2),
    "width_512": PagedCase((1, 2), (40, 66), heads=16, kv_lora_rank=512, rope=64, block_size=64),
    "many_rows": PagedCase((0,) * 125 + (1,) * 15, tuple(range(140)), heads=1),
    "one_long_row": PagedCase((1,) * 9, (5,) * 4 + (600,) + (5,) * 4, heads=1),
    "rows_of_any_length": PagedCase((2,) * 11, tuple(range(2, 112, 10)), heads=16),
    # A tile ends in a request, and in a block of keys.
    "prefixes": PagedCase((9, 0, 3), (131, 9, 64), heads=16, prefixes=3, padding=1),
    "more_tokens_in_a_prefix": PagedCase((70, 1), (3, 16), heads=2, prefixes=2),
    **{f"two_rows_{heads}": replace(TWO_ROWS, heads=heads) for heads in (1, 3, 16, 128)},
    "two_rows_fp32": replace(TWO_ROWS, dtype=FP32, heads=2, kv_lora_rank=16),
    "two_rows_long": replace(TWO_ROWS, kv_lengths=(700, *TWO_ROWS.kv_lengths[1:])),
    "two_rows_in_a_window": replace(TWO_ROWS, window=(37, 100)),
    "window_of_prefixes": replace(MIXED, window=(37, 100), prefixes=4),
    "window": replace(MIXED, window=(37, 100)),
    "window_at_the_start": replace(MIXED, window=(0, 64)),
    "window_behind_all": replace(MIXED, window=(150, None)),
    "window_empty": replace(MIXED, window=(64, 64)),
}
if ON_GPU:
    DEEP = PagedCase((1, 2, 0, 8), (5000, 333, 64, 777), kv_lora_rank=512, rope=64, block_size=64)
    CASES |= {f"deep_{heads}": replace(DEEP, heads=heads) for heads in (8, 16, 32, 40, 128)}
    CASES |= {f"deep_block_{size}": replace(DEEP, block_size=size) for size in (1, 16, 100, 256)}
    CASES["deep_prefill"] = replace(DEEP, query_lengths=(300, 2, 0, 500), heads=16)
    CASES["deep_fp16"] = replace(DEEP, dtype=FP16)
    CASES["deep_decode"] = replace(DEEP, query_lengths=(1, 1, 0, 1), heads=16)


@pytest.mark.no_cover
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name):
    """Amid NaN in blocks and slots that they may not read, and blocks that are not there."""
    check(CASES[name])


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("name", "num_splits"),
    [(n, 7) for n in ("block_16", "block_64", "decode_16", "window", "long")]
    + [("block_16", 1), ("decode_16", 2), ("window", 2)]
    # The interpreter takes seconds for each.
    + [("heads_40", 7), ("heads_128", 2), ("prefixes", 2), ("prefixes", 7)]
    + [("two_rows_3", 1), ("two_rows_16", 2), ("two_rows_long", 30)],
)
def test_splits(name, num_splits):
    """Of rows of one key, too: most of their splits are empty."""
    check(CASES[name], num_splits=num_splits)


@pytest.mark.parametrize("name", ["block_16", "decode_3", "window"])
def test_batch_invariant_mode(name):
    check(CASES[name], batch_invariant=True)


@pytest.mark.parametrize("cut", [1, 64, 149])
def test_merged_windows_are_the_whole(cut):
    case = replace(MIXED, dtype=FP32, heads=1, kv_lora_rank=16)
    whole = attend(case.inputs(DEVICE))
    parts = [
        attend(replace(case, window=window).inputs(DEVICE), window)
        for window in ((0, cut), (cut, None))
    ]
    for found, expected in zip(merge(*parts[0], *parts[1]), whole):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_rows_in_any_order_with_padding_between():
    inputs = replace(MIXED, starts=(10, 0, 3, 4)).inputs(DEVICE)
    expected = paged_reference(*inputs)
    found = attend(inputs)
    torch.testing.assert_close(found[0], expected[0], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=1e-5)


def test_lengths_come_from_the_device():
    assert_reads_lengths_from_the_device(attend, MIXED)


class Tables(NamedTuple):
    """What ``schedule`` made.

    Attributes:
        tiles: Entries of tiles.
        parts: Of each part that has something to do its pieces: tile, first key, the one past the
            last, and the place where the result waits, or -1.
    """

    tiles: list[list[int]]
    parts: list[list[tuple[int, int, int, int]]]

    @classmethod
    def read(cls, made: Schedule, block_keys: int) -> Tables:
        tiles, starts = made.tiles.tolist(), made.starts.tolist()
        assert starts == sorted(starts) and starts[0] == [0, 0]
        parts = []
        for number, (start, end) in enumerate(zip(starts, starts[1:])):
            pieces = []
            for tile in range(start[0], end[0] + (end[1] > 0)):
                keys, count = tiles[tile][4:6]
                first = block_keys * (start[1] if tile == start[0] else 0)
                last = min(keys, block_keys * end[1]) if tile == end[0] else keys
                if last > first or not first:
                    pieces.append(
                        (tile, first, last, 2 * number + (not first) if count > 1 else -1)
                    )
            parts.append(pieces)
        used = starts[-1][0]
        return cls(tiles[:used], [pieces for pieces in parts if pieces])


def rows_of(new, kv) -> Rows:
    """New tokens and keys of each, of a table that nobody reads."""
    return Rows.of(new, kv, torch.zeros(len(kv), 1, dtype=torch.int32, device=DEVICE))


class TestSchedule:
    """Tiles and parts, read off the tables."""

    def tables(
        self, rows: Rows, tiles: plan.Tiles, split_kv: plan.SplitKV, window: int = 1000, start=0
    ) -> Tables:
        lists = (rows.query_starts, rows.query_lengths, rows.kv_lengths)
        with poisoned_memory():
            made = schedule(*lists, start, plan.Division(tiles, split_kv, 16, window))
        return Tables.read(made, 16)

    def test_tiles(self):
        rows = rows_of((5, 0, 1, 4), (70, 9, 3, 4))
        tiles = plan.tiles_for(4, 2, 20, 5, 4)
        assert tiles == plan.Tiles(heads=2, tokens=2, head_blocks=1, max_tiles=14, max_tokens=5)
        found = self.tables(rows, tiles, plan.SplitKV(14, 4, 1, 1))
        assert [entry[:6] for entry in found.tiles] == [
            [0, 0, 2, 66, 67, 1],
            [0, 2, 2, 68, 69, 1],
            [0, 4, 1, 70, 70, 1],
            [2, 5, 1, 3, 3, 1],
            [3, 6, 2, 1, 2, 1],
            [3, 8, 2, 3, 4, 1],
        ]
        keys = [entry[4] for entry in found.tiles]
        assert found.parts == [[(tile, 0, each, -1)] for tile, each in enumerate(keys)]

    def test_padding_is_cleared(self):
        """Of tokens in no request alone; ``CASES`` have both ways to do so."""
        rows = rows_of((5, 0, 1, 4), (70, 9, 3, 4))
        out, lse = torch.ones(20, 2, 16, device=DEVICE), torch.ones(20, 2, device=DEVICE)
        clear_padding(rows.query_starts, rows.query_lengths, out, lse)
        assert out.sum((1, 2)).tolist() == [32] * 10 + [0] * 10
        assert lse.tolist() == [[1, 1]] * 10 + [[-torch.inf] * 2] * 10

    def test_parts_are_equal(self):
        """10, 1 and 41 blocks, of which each tile counts for two more, in six parts of 10."""
        rows = rows_of((1, 1, 1), (160, 16, 648))
        tiles = plan.tiles_for(3, 16, 20, 1, 16)
        found = self.tables(rows, tiles, plan.SplitKV(6, 6, 1, 0))
        assert found.parts == [
            [(0, 0, 128, 1)],
            [(0, 128, 160, 2), (1, 0, 16, -1), (2, 0, 48, 3)],
            [(2, 48, 208, 4)],
            [(2, 208, 368, 6)],
            [(2, 368, 528, 8)],
            [(2, 528, 648, 10)],
        ]
        assert [entry[5] for entry in found.tiles] == [2, 1, 5]
        assert [found.tiles[tile][6] for tile in (0, 2)] == [0, 1]

    def test_a_small_piece_is_left_to_its_neighbour(self):
        """Of less than half the minimum: the same batch, cut where one block would be left."""
        rows = rows_of((1, 1), (336, 336))
        tiles = plan.tiles_for(2, 16, 20, 1, 16)
        # 2 * (21 + 2) in three parts of 16: cuts behind 14 blocks, and behind 7 of the other tile.
        found = self.tables(rows, tiles, plan.SplitKV(3, 3, 1, 0))
        assert [[piece[1:3] for piece in part] for part in found.parts] == [
            [(0, 224)],
            [(224, 336), (0, 112)],
            [(112, 336)],
        ]
        found = self.tables(rows, tiles, plan.SplitKV(3, 3, 16, 0))
        assert [[piece[1:3] for piece in part] for part in found.parts] == [[(0, 336)], [(0, 336)]]

    @pytest.mark.parametrize("fixed", [0, 1, 3])
    @pytest.mark.parametrize("seed", range(6))
    def test_every_key_of_every_token_once(self, seed, fixed):
        """Of any batch: no key is left out or seen twice, and no two splits have the same place."""
        draw = random.Random(seed)
        new = [draw.choice((0, 1, 1, 2, 5)) for _ in range(9)]
        kv = [draw.choice((0, 3, 40, 300, 1500)) + length for length in new]
        rows = rows_of(new, kv)
        start, window = draw.choice(((0, 1600), (32, 500)))
        tiles = plan.tiles_for(9, 2, 20 + sum(new), 5, 4)
        parts = tiles.max_tiles * fixed if fixed else draw.choice((1, 3, 10, 60))
        split_kv = plan.SplitKV(parts, draw.choice((4, 20)), draw.choice((1, 4)), fixed)
        found = self.tables(rows, tiles, split_kv, window, start)
        pieces = [piece for part in found.parts for piece in part]
        waiting = [place for *_, place in pieces if place >= 0]
        assert len(set(waiting)) == len(waiting)
        assert all(place < places(split_kv) for place in waiting)
        assert sum(entry[2] for entry in found.tiles) == sum(new)
        for tile, (*_, keys, count, first_part, _) in enumerate(found.tiles):
            mine = [piece[1:] for piece in pieces if piece[0] == tile]
            assert len(mine) == count and mine[0][0] == 0 and mine[-1][1] == keys
            assert [begin for begin, _, _ in mine[1:]] == [end for _, end, _ in mine[:-1]]
            expected = [2 * (first_part + i) + (not i) for i in range(count)]
            assert [place for *_, place in mine] == (expected if count > 1 else [-1])


class TestPlan:
    """Decisions for DeepSeek-V3's widths on a GPU of 132 multiprocessors."""

    def parts(self, monkeypatch, kv: list[int], heads: int, resident=1, rows=64):
        """Keys of each piece of each part, and programs."""
        monkeypatch.setattr(plan, "processors", lambda device: 132)
        batch = rows_of([1] * len(kv), kv)
        tiles = plan.tiles_for(len(kv), heads, len(kv), 1, rows)
        split_kv = plan.split_kv_for(tiles, max(kv), 64, resident, torch.device("cuda"))
        lists = (batch.query_starts, batch.query_lengths, batch.kv_lengths)
        made = schedule(*lists, 0, plan.Division(tiles, split_kv, 64, max(kv)))
        found = Tables.read(made, 64).parts
        keys = [[end - begin for _, begin, end, _ in part] for part in found]
        return keys, len(found) * tiles.head_blocks

    @pytest.mark.parametrize(
        "batch, kv, heads, programs, keys",
        [
            (128, 8192, 128, 128, [8192, 8192]),
            (128, 8192, 16, 128, [8192]),
            (32, 8192, 128, 128, [4096]),
            (32, 8192, 16, 128, [2048]),
            (8, 32768, 128, 128, [4096]),
            (1, 131072, 16, 128, [1024]),
            (1, 64, 16, 1, [64]),
        ],
    )
    def test_rows_of_one_length(self, monkeypatch, batch, kv, heads, programs, keys):
        """Equal parts that end with a tile, or equal splits."""
        parts, found = self.parts(monkeypatch, [kv] * batch, heads)
        assert (found, parts) == (programs, [keys] * len(parts))

    def test_two_programs_on_a_multiprocessor(self, monkeypatch):
        parts, programs = self.parts(monkeypatch, [8192] * 128, 16, resident=2, rows=16)
        assert (programs, parts) == (256, [[4096]] * 256)

    def test_rows_of_almost_one_length(self, monkeypatch):
        """They are not split into a large part and a small rest."""
        kv = list(range(8064, 8192))
        assert self.parts(monkeypatch, kv, 16)[0] == [[keys] for keys in kv]

    @pytest.mark.parametrize("heads", [16, 128])
    @pytest.mark.parametrize(
        "kv",
        [
            pytest.param(list(range(1, 8192, 8192 // batch)), id=f"{batch}_rows_of_any_length")
            for batch in (32, 64, 128, 300)
        ]
        + [
            pytest.param([100] * 127 + [131072], id="one_long_row"),
            pytest.param([8192] * 140, id="rows_for_one_wave_and_a_little"),
        ],
    )
    @pytest.mark.no_cover
    def test_no_part_is_much_longer_than_its_share(self, monkeypatch, kv, heads):
        """In blocks of 64 keys, with the two more that each tile of a part takes."""
        parts, programs = self.parts(monkeypatch, kv, heads)
        assert programs <= 132
        blocks = [-(-keys // 64) for keys in kv]
        share = sum(each + 2 for each in blocks) * max(heads // 64, 1) / 132
        longest = max(sum(-(-keys // 64) + 2 for keys in part) for part in parts)
        assert longest <= 1.02 * share + 6

    def test_registers_leave_room_for_every_program_that_is_counted_on(self):
        """Of 65536 on a multiprocessor, of which 255 are the most that a thread can have."""
        assert (plan.most_registers(1, 8), plan.most_registers(2, 8)) == (None, 128)

    def test_heads_are_padded_to_a_power_of_two(self):
        assert plan.tiles_for(4, 40, 4, 1, 64) == plan.Tiles(64, 1, 1, 4, 1)
        assert plan.tiles_for(4, 128, 4, 1, 64) == plan.Tiles(64, 1, 2, 4, 1)
        assert plan.tiles_for(4, 16, 70, 30, 64) == plan.Tiles(16, 4, 1, 4 + 17, 30)

    def test_few_rows_take_small_blocks(self):
        sizes = [plan.blocks_for(BF16, 512, 64, DEVICE, rows)[0].rows for rows in (3, 16, 20, 40)]
        assert sizes == [16, 16, 32, 64]
        training = launch_for(BF16, 512, 64, DEVICE).forward
        assert plan.blocks_for(BF16, 512, 64, DEVICE, None)[0] == training


class TestBatchInvariance:
    CASE = PagedCase((40,), (90,), heads=4, block_size=16)

    @pytest.fixture(autouse=True)
    def _products(self, monkeypatch):
        multiply_in_one_order(monkeypatch)

    def test_any_chunks_and_neighbours(self):
        """Every chunk of the prompt on its own, behind rows of others, gives the same bits."""
        inputs = q_content, q_rope, cache, rows, scale = self.CASE.inputs(DEVICE)
        expected = attend(inputs, batch_invariant=True)
        others = torch.randn_like(q_content[:9]), torch.randn_like(q_rope[:9])
        for start, end in ((0, 1), (1, 17), (17, 40), (39, 40)):
            mine = slice(start, end)
            table = torch.cat((rows.block_table, rows.block_table))
            lengths = (9, end - start), (60, 50 + end)
            both = Rows.of(*lengths, table)
            query = (torch.cat((o, q[mine])) for o, q in zip(others, (q_content, q_rope)))
            found = attend((*query, cache, both, scale), batch_invariant=True)
            assert_same_bits([x[9:] for x in found], [x[mine] for x in expected])

    def test_training_forward_gives_the_same_bits(self):
        """Of the whole sequence at once, from keys that are not paged."""
        case = PagedCase((40,), (40,), heads=4, block_size=16)
        inputs = case.inputs(DEVICE)
        q_content, q_rope, latent, k_rope = training_operands(inputs)
        tokens, _, heads, width = q_content.shape
        launch = launch_for(q_content.dtype, width, q_rope.shape[-1], DEVICE)
        tiles = query_tiles([Span(0, tokens, 0, tokens, 0)], launch.query_tokens(heads)).to(DEVICE)
        *trained, _ = operators.latent_attention_forward(
            q_content, q_rope, latent, k_rope, tiles, case.scale, "triton"
        )
        assert_same_bits([x[:, 0] for x in trained], attend(inputs, batch_invariant=True))


def test_opcheck():
    """``torch.library.opcheck``: schema, shapes without data, and tracing."""
    case = PagedCase((1, 2), (5, 9), heads=2, kv_lora_rank=16, padding=1)
    q_content, q_rope, cache, rows, scale = case.inputs(DEVICE)
    lists = (rows.query_starts, rows.query_lengths, rows.kv_lengths, rows.block_table)
    numbers = (rows.max_query_length, rows.max_kv_length, scale, 0, None, False)
    operator = torch.ops.absorbed_mla.paged_attention_forward.default
    # The LSE of padding is no number, of which opcheck compares the gradients.
    torch.library.opcheck(operator, (q_content, q_rope, cache, *lists, *numbers))


def test_one_schedule_for_all_layers(monkeypatch):
    """Each way to read the same rows has its own; other rows have others."""
    made, schedule_of = [], operators.paged_schedule
    monkeypatch.setattr(
        operators, "paged_schedule", lambda *args: made.append(1) or schedule_of(*args)
    )
    for count, rows_of in enumerate((MIXED, replace(MIXED, kv_lengths=(70, 30, 9, 110)))):
        inputs = rows_of.inputs(DEVICE)
        for number, window in enumerate([(0, None), (0, None), (16, 100), (0, None)]):
            found = TRITON.forward(*inputs, *window)
            assert_equals_reference(found, inputs, window)
            assert len(made) == 2 * count + (1 if number < 2 else 2)
