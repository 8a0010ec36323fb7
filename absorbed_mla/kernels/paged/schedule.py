"""Which program attends from which tokens to which keys, made on the device from the rows' tables.

A tile is some tokens of one row. The table has a row for every tile that there may be, int32
[tiles, 5]: row, first token on the token axis, number of tokens (0: no such tile), keys that the
first token sees, counted from the first key in the cache (each token sees one more than the one
before it; not above 0: none), and keys that a program takes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.paged.plan import Splits, Tiles
from absorbed_mla.kernels.portable.common import narrow

_TILES_PER_PROGRAM = 16
_ROWS_AT_A_TIME = 128


def schedule(
    query_starts: Tensor,
    query_lengths: Tensor,
    kv_lengths: Tensor,
    key_start: int,
    window: int,
    tiles: Tiles,
    splits: Splits,
    block_keys: int,
    out: Tensor,
    lse: Tensor,
    interpreted: bool,
) -> Tensor:
    """The table of tiles; it also writes 0 and -inf for tokens that are in no row.

    Args:
        query_starts: As in ``Rows``, like the next two.
        query_lengths: Int32 [R].
        kv_lengths: Int32 [R].
        key_start: First key in the cache.
        window: Keys in the cache.
        tiles: How rows are cut.
        splits: How their keys are.
        block_keys: Keys that a program loads at a time.
        out: [T, N, C], contiguous.
        lse: [T, N], contiguous.
        interpreted: Whether this runs in the interpreter.
    """
    tokens, heads, width = out.shape
    table = torch.empty((tiles.most, 5), dtype=torch.int32, device=out.device)
    programs = triton.cdiv(tiles.most, _TILES_PER_PROGRAM)
    _schedule_kernel[(programs + tokens,)](
        query_starts,
        query_lengths,
        kv_lengths,
        table,
        out,
        lse,
        len(query_starts),
        key_start,
        window,
        tiles.most,
        programs,
        splits.most,
        splits.programs,
        splits.least_keys,
        tiles.head_blocks,
        heads,
        TILE_TOKENS=tiles.tokens,
        BLOCK_KEYS=block_keys,
        TILES=_TILES_PER_PROGRAM,
        ROWS=_ROWS_AT_A_TIME,
        C=width,
        INTERPRETED=interpreted,
        num_warps=4,
    )
    return table


# What changes with every batch is not compiled in.
@triton.jit(
    do_not_specialize=[
        "num_rows",
        "key_start",
        "window",
        "num_tiles",
        "tile_programs",
        "most_splits",
        "work_programs",
        "least_keys",
    ],
    do_not_specialize_on_alignment=["starts_ptr", "lengths_ptr", "kv_ptr"],
)
def _schedule_kernel(
    starts_ptr,
    lengths_ptr,
    kv_ptr,
    table_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    key_start,
    window,
    num_tiles,
    tile_programs,
    most_splits,
    work_programs,
    least_keys,
    head_blocks,
    heads,
    TILE_TOKENS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    program = tl.program_id(0)
    if program >= tile_programs:
        token = program - tile_programs
        _clear_if_in_no_row(
            starts_ptr, lengths_ptr, out_ptr, lse_ptr, num_rows, token, heads, ROWS, C, INTERPRETED
        )
        return
    # [TILES]
    tile = program * TILES + tl.arange(0, TILES)
    row = tl.full([TILES], 0, tl.int32)  # rows whose tiles all come before
    before = tl.full([TILES], 0, tl.int32)  # their tiles
    counted, work = 0, 0
    for first in range(0, num_rows, ROWS):
        # [ROWS]
        index = first + tl.arange(0, ROWS)
        there = index < num_rows
        length = tl.load(lengths_ptr + index, mask=there, other=0)
        keys = tl.load(kv_ptr + index, mask=there, other=0) - key_start
        keys = tl.minimum(tl.maximum(keys, 0), window)
        tiles = (length + TILE_TOKENS - 1) // TILE_TOKENS
        up_to = counted + tl.associative_scan(tiles, 0, tl.standard._sum_combine)
        # [TILES, ROWS]
        past = (up_to[None, :] <= tile[:, None]) & there[None, :]
        row += tl.reduce(past.to(tl.int32), 1, tl.standard._sum_combine)
        most = tl.reduce(tl.where(past, up_to[None, :], 0), 1, tl.standard._elementwise_max)
        before = tl.maximum(before, most)
        counted += tl.reduce(tiles, 0, tl.standard._sum_combine)
        blocks = tiles * ((keys + BLOCK_KEYS - 1) // BLOCK_KEYS)
        work += tl.reduce(blocks, 0, tl.standard._sum_combine)

    found = (row < num_rows) & (tile < num_tiles)
    skipped = (tile - before) * TILE_TOKENS
    length = tl.load(lengths_ptr + row, mask=found, other=0)
    seen = tl.load(kv_ptr + row, mask=found, other=0) - length + 1 + skipped - key_start
    tokens = tl.minimum(length - skipped, TILE_TOKENS)
    keys = tl.minimum(tl.maximum(seen + tokens - 1, 0), window)
    # Equal parts of all the work, but of a row at most as many as there are programs.
    share = (work * head_blocks + work_programs - 1) // work_programs * BLOCK_KEYS
    blocks = (keys + BLOCK_KEYS - 1) // BLOCK_KEYS
    part = tl.maximum((blocks + most_splits - 1) // most_splits * BLOCK_KEYS, least_keys)
    start = tl.load(starts_ptr + row, mask=found, other=0) + skipped
    entry = table_ptr + tile * 5
    tl.store(entry, row, mask=tile < num_tiles)
    tl.store(entry + 1, start, mask=tile < num_tiles)
    tl.store(entry + 2, tl.where(found, tokens, 0), mask=tile < num_tiles)
    tl.store(entry + 3, seen, mask=tile < num_tiles)
    tl.store(entry + 4, tl.maximum(part, share), mask=tile < num_tiles)


@triton.jit
def _clear_if_in_no_row(
    starts_ptr,
    lengths_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    token,
    heads,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    members = 0
    for first in range(0, num_rows, ROWS):
        index = first + tl.arange(0, ROWS)
        there = index < num_rows
        start = tl.load(starts_ptr + index, mask=there, other=0)
        length = tl.load(lengths_ptr + index, mask=there, other=0)
        member = (token >= start) & (token < start + length)
        members += tl.reduce(member.to(tl.int32), 0, tl.standard._sum_combine)
    if members == 0:
        for head in range(heads):
            row = token.to(tl.int64) * heads + head
            nothing = narrow(tl.full([C], 0.0, tl.float32), out_ptr.dtype.element_ty, INTERPRETED)
            tl.store(out_ptr + row * C + tl.arange(0, C), nothing)
            tl.store(lse_ptr + row, float("-inf"))
