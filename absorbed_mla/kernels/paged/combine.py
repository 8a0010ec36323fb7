"""One output from those over parts of the keys, merged by their LSE in the order of the keys."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.paged.plan import Cut, Tiles
from absorbed_mla.kernels.paged.schedule import TABLE_COLUMNS, Schedule
from absorbed_mla.kernels.triton.common import LN_2, interpreted, narrow

# Numbers of a program of 128 threads that are on their way together, and columns of a row, which a
# few programs share where it has many parts.
_LOADED = 4096
_COLUMNS = 512
_PARTS = (2, 32)
# Programs for every one that attends at a time: rows that nothing is to be done for cost little if
# a program has many of them.
_PROGRAMS = 8


def combine(
    parts: Tensor, parts_lse: Tensor, table: Schedule, tiles: Tiles, cut: Cut, result
) -> None:
    """Write output and LSE of the tokens whose keys are in several parts.

    Args:
        parts: Fp32 [places, head blocks, rows of a tile, C]; read where a part has keys.
        parts_lse: Fp32 [places, head blocks, rows of a tile], in bits.
        table: Of the batch.
        tiles: How rows were cut.
        cut: How their keys were.
        result: Output [T, N, C] and LSE [T, N], contiguous.
    """
    out, lse = result
    heads, width = out.shape[1:]
    expected = triton.cdiv(cut.programs, tiles.most * tiles.head_blocks)
    together = min(max(triton.next_power_of_2(expected), _PARTS[0]), _PARTS[1])
    columns = min(width, _COLUMNS, _LOADED // together)
    rows = max(_LOADED // (together * columns), 1)
    groups = triton.cdiv(min(tiles.tokens, tiles.row_tokens) * heads, rows)
    programs = max(_PROGRAMS * cut.programs // tiles.most, 1)
    rounds = triton.cdiv(groups, programs)
    _combine_kernel[(tiles.most, triton.cdiv(groups, rounds), width // columns)](
        parts,
        parts_lse,
        out,
        lse,
        table.tiles,
        rounds,
        heads,
        tiles.head_blocks,
        HEADS=tiles.heads,
        TOKENS=tiles.tokens,
        C=width,
        ROWS=rows,
        PARTS=together,
        COLUMNS=columns,
        INTERPRETED=interpreted(),
        num_warps=4,
    )


def places(tiles: Tiles, cut: Cut) -> int:
    """Parts that can wait for others at most; 0 if nothing is cut."""
    return min(2 * cut.more, tiles.most + cut.more)


@triton.jit(do_not_specialize=["rounds"])
def _combine_kernel(
    parts_ptr,
    parts_lse_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    rounds,
    heads,
    head_blocks,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    entry = table_ptr + tl.program_id(0) * TABLE_COLUMNS
    first, tokens, keys = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    part_keys = tl.load(entry + 3)
    if (tokens == 0) | (keys <= part_keys):
        return
    first_place, equal, last_place = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6)
    count = (keys + part_keys - 1) // part_keys
    # [PARTS], [COLUMNS]
    number = tl.arange(0, PARTS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    for one in range(rounds):
        # [ROWS]: heads of tokens as they lie in the output, and in a tile.
        index = (tl.program_id(1) * rounds + one) * ROWS + tl.arange(0, ROWS)
        inside = index < tokens * heads
        token, head = index // heads, index % heads
        place_in_tile = head // HEADS * (TOKENS * HEADS) + token * HEADS + head % HEADS
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.full([ROWS], 0.0, tl.float32)
        acc = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
        # In an order that the number of parts alone decides.
        for start in range(0, count, PARTS):
            part = start + number
            place = tl.where(part < equal, first_place + part, last_place).to(tl.int64)
            # [ROWS, PARTS]
            source = place[None, :] * (head_blocks * TOKENS * HEADS) + place_in_tile[:, None]
            there = (part < count)[None, :] & inside[:, None]
            lse = tl.load(parts_lse_ptr + source, mask=there, other=float("-inf"))
            # [ROWS, PARTS, COLUMNS]
            values = tl.load(
                parts_ptr + source[:, :, None] * C + column[None, None, :],
                mask=there[:, :, None],
                other=0.0,
            )
            higher = tl.maximum(top, tl.reduce(lse, 1, tl.standard._elementwise_max))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            decay = tl.exp2(top - shift)
            weight = tl.exp2(lse - shift[:, None])
            total = total * decay + tl.reduce(weight, 1, tl.standard._sum_combine)
            weighted = tl.reduce(values * weight[:, :, None], 1, tl.standard._sum_combine)
            acc = acc * decay[:, None] + weighted
            top = higher
        blind = total == 0.0
        out = acc / tl.where(blind, 1.0, total)[:, None]
        row = first.to(tl.int64) * heads + index
        pointers = out_ptr + row[:, None] * C + column[None, :]
        tl.store(pointers, narrow(out, out_ptr.dtype.element_ty, INTERPRETED), mask=inside[:, None])
        if tl.program_id(2) == 0:
            value = tl.where(blind, float("-inf"), (top + tl.log2(total)) * LN_2)
            tl.store(lse_ptr + row, value, mask=inside)
