"""Tables of the work of each program: its tokens and its keys, made on the device.

A tile is some tokens of one request. Where the device would be idle otherwise, the keys of a
request are split (split_kv.py): equal splits, and perhaps a shorter last one. A program takes one
split of one tile. Programs start in the order of their table: equal splits, which are the longest,
first, and shorter last splits at the end. Two tables:

* ``programs``, int32 [programs, 8]: request, first token on the token axis, number of tokens (0:
  nothing to do), keys that the first token sees (each token sees one more than the one before it;
  not above 0: none), first key and the one past the last, and the place where the result waits for
  the other splits, or -1 if there are none. Keys are counted from the first one in the cache.
* ``tiles``, int32 [tiles, 8], for combining splits: first token, number of tokens, keys that any of
  them sees, keys of a split, place of the first split, number of equal splits, which have
  consecutive places, and place of the shorter last split, if there is one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.paged.plan import SplitKV, Tiles
from absorbed_mla.kernels.paged.split_kv import choose_split_size, load_lengths, splits_of, work
from absorbed_mla.kernels.triton.common import narrow

TABLE_COLUMNS = tl.constexpr(8)
_PROGRAMS = 32
_REQUESTS_AT_A_TIME = 128
# Entries of the table of programs that are stored at once.
_STORED = 512


class Schedule(NamedTuple):
    """Both tables; see above."""

    programs: Tensor
    tiles: Tensor


def schedule(
    query_starts: Tensor,
    query_lengths: Tensor,
    kv_lengths: Tensor,
    key_start: int,
    window: int,
    tiles: Tiles,
    split_kv: SplitKV,
    block_keys: int,
    out: Tensor,
    lse: Tensor,
    interpreted: bool,
) -> Schedule:
    """Make the tables, and write output 0 and LSE -inf for tokens that are in no request.

    Args:
        query_starts: As in ``inference.rows.Rows``, like the next two; int32 [Q].
        query_lengths: Int32 [Q].
        kv_lengths: Int32 [Q].
        key_start: First key in the cache.
        window: Keys in the cache.
        tiles: Tiles of the queries.
        split_kv: Bounds of the splits.
        block_keys: Keys that a program loads at a time.
        out: [T, N, C], contiguous.
        lse: [T, N], contiguous.
        interpreted: Whether this runs in the interpreter.
    """
    tokens, heads, kv_lora_rank = out.shape
    table = out.new_empty(
        (tiles.max_tiles + split_kv.max_extra, TABLE_COLUMNS.value), dtype=torch.int32
    )
    tile_table = out.new_empty((tiles.max_tiles, TABLE_COLUMNS.value), dtype=torch.int32)
    # Several programs share the tiles of long requests.
    tile_programs = min(triton.cdiv(tiles.max_tokens, tiles.tokens), _PROGRAMS)
    block = min(max(triton.next_power_of_2(len(query_starts)), 16), _REQUESTS_AT_A_TIME)
    _schedule_kernel[(tile_programs + tokens,)](
        query_starts,
        query_lengths,
        kv_lengths,
        table,
        tile_table,
        out,
        lse,
        len(query_starts),
        key_start,
        window,
        tiles.max_tiles,
        tile_programs,
        split_kv.max_extra,
        split_kv.programs,
        split_kv.min_blocks,
        split_kv.num_splits,
        tiles.head_blocks,
        heads,
        TILE_TOKENS=tiles.tokens,
        BLOCK_KEYS=block_keys,
        REQUESTS=block,
        SPLITS=_STORED // block,
        C=kv_lora_rank,
        INTERPRETED=interpreted,
        num_warps=4,
    )
    return Schedule(table, tile_table)


# Arguments that change with every batch are not compiled in.
@triton.jit(
    do_not_specialize=[
        "num_requests",
        "key_start",
        "window",
        "num_tiles",
        "tile_programs",
        "max_extra",
        "concurrent",
        "min_blocks",
        "num_splits",
    ],
    do_not_specialize_on_alignment=["starts_ptr", "lengths_ptr", "kv_ptr"],
)
def _schedule_kernel(
    starts_ptr,
    lengths_ptr,
    kv_ptr,
    table_ptr,
    tile_table_ptr,
    out_ptr,
    lse_ptr,
    num_requests,
    key_start,
    window,
    num_tiles,
    tile_programs,
    max_extra,
    concurrent,
    min_blocks,
    num_splits,
    head_blocks,
    heads,
    TILE_TOKENS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    REQUESTS: tl.constexpr,
    SPLITS: tl.constexpr,
    C: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    program = tl.program_id(0)
    if program >= tile_programs:
        token = program - tile_programs
        _clear_if_in_no_request(
            starts_ptr,
            lengths_ptr,
            out_ptr,
            lse_ptr,
            num_requests,
            token,
            heads,
            REQUESTS,
            C,
            INTERPRETED,
        )
        return
    split_blocks, all_equal = choose_split_size(
        lengths_ptr,
        kv_ptr,
        num_requests,
        key_start,
        window,
        max_extra,
        concurrent,
        min_blocks,
        num_splits,
        head_blocks,
        TILE_TOKENS,
        BLOCK_KEYS,
        REQUESTS,
    )
    all_tiles, equal_splits, unsplit_tiles, last_splits = 0, 0, 0, 0
    for first in range(0, num_requests, REQUESTS):
        # [REQUESTS]
        request = first + tl.arange(0, REQUESTS)
        length, kv_length = load_lengths(
            lengths_ptr, kv_ptr, first, num_requests, key_start, REQUESTS
        )
        start = tl.load(starts_ptr + request, mask=request < num_requests, other=0)
        tiles, blocks = work(length, kv_length, window, TILE_TOKENS, BLOCK_KEYS)
        equal, last, split = splits_of(blocks, split_blocks, num_splits)
        whole = (equal == 0) & (last == 0)
        # Where each request's first are, in the order of requests and of tiles in a request.
        tile = all_tiles + _sum_before(tiles)
        first_place = equal_splits + _sum_before(equal * tiles)
        unsplit = unsplit_tiles + _sum_before(tl.where(whole, tiles, 0))
        last_place = last_splits + _sum_before(last * tiles)
        most = tl.reduce(tiles, 0, tl.standard._elementwise_max)
        max_splits = tl.reduce(equal, 0, tl.standard._elementwise_max)
        for index in range(program, most, tile_programs):
            there = index < tiles
            skipped = index * TILE_TOKENS
            tokens = tl.minimum(length - skipped, TILE_TOKENS)
            seen = kv_length - length + 1 + skipped
            keys = tl.minimum(tl.maximum(seen + tokens - 1, 0), window)
            # All tiles of a request are split at the same keys; one may see the first split only.
            split_keys = tl.where(whole, tl.maximum(keys, 1), split * BLOCK_KEYS)
            alone = keys <= split_keys
            place = first_place + index * equal
            place_of_last = all_equal + last_place + index

            entry = tile_table_ptr + (tile + index) * TABLE_COLUMNS
            _store(
                entry, there, start + skipped, tokens, keys, split_keys, place, equal, place_of_last
            )
            for one in range(0, max_splits, SPLITS):
                # [REQUESTS, SPLITS]
                number = one + tl.arange(0, SPLITS)[None, :]
                begin = number * split_keys[:, None]
                end = tl.minimum((number + 1) * split_keys[:, None], keys[:, None])
                _store(
                    table_ptr + (place[:, None] + number) * TABLE_COLUMNS,
                    there[:, None] & (number < equal[:, None]),
                    request[:, None],
                    start[:, None] + skipped,
                    _tokens_of_split(tokens[:, None], begin, end),
                    seen[:, None],
                    begin,
                    end,
                    tl.where(alone[:, None], -1, place[:, None] + number),
                )
            # The only split of a request, or its shorter last one, which go to the end, backwards.
            own = tl.where(whole, all_equal + unsplit, num_tiles + max_extra - 1 - last_place)
            begin = equal * split_keys
            end = tl.minimum(begin + split_keys, keys)
            _store(
                table_ptr + (own + tl.where(whole, index, -index)) * TABLE_COLUMNS,
                there & (whole | (last > 0)),
                request,
                start + skipped,
                _tokens_of_split(tokens, begin, end),
                seen,
                begin,
                end,
                tl.where(whole | alone, -1, place_of_last),
            )
        all_tiles += tl.reduce(tiles, 0, tl.standard._sum_combine)
        equal_splits += tl.reduce(equal * tiles, 0, tl.standard._sum_combine)
        unsplit_tiles += tl.reduce(tl.where(whole, tiles, 0), 0, tl.standard._sum_combine)
        last_splits += tl.reduce(last * tiles, 0, tl.standard._sum_combine)
    _clear(
        table_ptr + 2, equal_splits + unsplit_tiles, num_tiles + max_extra - last_splits, REQUESTS
    )
    _clear(tile_table_ptr + 1, all_tiles, num_tiles, REQUESTS)


@triton.jit
def _clear(column_ptr, begin, end, BLOCK: tl.constexpr):
    """Write that entries have no tokens."""
    for first in range(begin, end, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        tl.store(column_ptr + entry * TABLE_COLUMNS, 0, mask=entry < end)


@triton.jit
def _sum_before(values):
    """Exclusive cumulative sum."""
    return tl.associative_scan(values, 0, tl.standard._sum_combine) - values


@triton.jit
def _tokens_of_split(tokens, begin, end):
    """0 where a tile sees no key of a split, except the first split, which writes the result."""
    return tl.where((begin > 0) & (begin >= end), 0, tokens)


@triton.jit
def _store(entry, mask, first, second, third, fourth, fifth, sixth, seventh):
    """Store entries of a table, column by column."""
    tl.store(entry, first, mask=mask)
    tl.store(entry + 1, second, mask=mask)
    tl.store(entry + 2, third, mask=mask)
    tl.store(entry + 3, fourth, mask=mask)
    tl.store(entry + 4, fifth, mask=mask)
    tl.store(entry + 5, sixth, mask=mask)
    tl.store(entry + 6, seventh, mask=mask)


@triton.jit
def _clear_if_in_no_request(
    starts_ptr,
    lengths_ptr,
    out_ptr,
    lse_ptr,
    num_requests,
    token,
    heads,
    REQUESTS: tl.constexpr,
    C: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    members = 0
    for first in range(0, num_requests, REQUESTS):
        index = first + tl.arange(0, REQUESTS)
        there = index < num_requests
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
