"""Scheduler metadata of paged attention: each program's tokens and keys, made once a step.

A tile is some tokens of one row. All tiles one after the other are cut into parts
(split_kv.py), each a range of tiles of which the first may begin, and the last may end, between two
blocks of keys. A program goes through one part, for some heads. Tables:

* ``tiles``, int32 [tiles, 8]: row, first token on the token axis, number of tokens, keys that the
  first token sees (each next token sees one more, up to the next column; not above 0: none), keys
  that any of them sees at most, parts that hold the tile; the first part, if there are several;
  else the offset of its results in tokens: T for prefixes (``merge_rows.py``).
* ``starts``, int32 [parts + 1, 2]: the tile and the block of its keys where a part begins, which is
  where the part before it ends. Parts without work are at the end.
* ``token_tiles``, int32 [T, 2], where there are prefixes: each token's tile of a prefix, and its
  tile of another row; -1: none.

Keys are counted from the first one in the cache. The result of a tile that is in several parts
waits for the others: where the tile begins, at place 2 * part + 1, and where it goes on, at place
2 * part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.paged.plan import Division
from absorbed_mla.kernels.paged.split_kv import START, ceil_div, choose_step, load_lengths, work
from absorbed_mla.kernels.triton.common import max_of, sum_before, sum_of

TABLE_COLUMNS = tl.constexpr(8)
_PROGRAMS = 32
# Requests that are looked at together: a kernel for few of them, whose tables take less time, and
# one for all other batches. Each other number would be compiled while an engine serves.
_REQUESTS = (16, 128)
# Entries of the table of parts that are stored at once.
_STORED = 512


class Schedule(NamedTuple):
    """The tables; see above."""

    tiles: Tensor
    starts: Tensor
    token_tiles: Tensor | None = None


def schedule(
    query_starts: Tensor,
    query_lengths: Tensor,
    kv_lengths: Tensor,
    key_start: int,
    division: Division,
    prefixes: int = 0,
    tokens: int = 0,
) -> Schedule:
    """Make the tables.

    Args:
        query_starts: As in ``inference.rows.Rows``, like the next two; int32 [Q].
        query_lengths: Int32 [Q].
        kv_lengths: Int32 [Q].
        key_start: First key in the cache.
        division: Of the batch.
        prefixes: As in ``Rows``.
        tokens: T, if there are prefixes.
    """
    tiles, split_kv, block_keys, window = division
    tile_table = query_starts.new_empty((tiles.max_tiles, TABLE_COLUMNS.value), dtype=torch.int32)
    starts = query_starts.new_empty((split_kv.parts + 1, 2), dtype=torch.int32)
    token_tiles = query_starts.new_full((tokens, 2), -1, dtype=torch.int32) if prefixes else None
    # Several programs share the tiles of long requests.
    tile_programs = min(-(-tiles.max_tokens // tiles.tokens), _PROGRAMS)
    block = next((few for few in _REQUESTS if len(query_starts) <= few), _REQUESTS[-1])
    launch(
        _schedule_kernel,
        (tile_programs,),
        query_starts,
        query_lengths,
        kv_lengths,
        tile_table,
        starts,
        token_tiles,
        len(query_starts),
        key_start,
        window,
        tiles.max_tiles,
        tile_programs,
        split_kv.parts,
        split_kv.min_blocks,
        split_kv.num_splits,
        tiles.head_blocks,
        prefixes,
        tokens,
        TILE_TOKENS=tiles.tokens,
        BLOCK_KEYS=block_keys,
        REQUESTS=block,
        CUTS=_STORED // block,
        num_warps=4,
    )
    return Schedule(tile_table, starts, token_tiles)


# Arguments that change with every batch are not compiled in.
@triton.jit(
    do_not_specialize=[
        "num_requests",
        "key_start",
        "window",
        "num_tiles",
        "tile_programs",
        "parts",
        "min_blocks",
        "num_splits",
        "prefixes",
        "num_tokens",
    ],
    do_not_specialize_on_alignment=["query_starts_ptr", "lengths_ptr", "kv_ptr"],
)
def _schedule_kernel(
    query_starts_ptr,
    lengths_ptr,
    kv_ptr,
    tile_table_ptr,
    starts_ptr,
    token_tiles_ptr,
    num_requests,
    key_start,
    window,
    num_tiles,
    tile_programs,
    parts,
    min_blocks,
    num_splits,
    head_blocks,
    prefixes,
    num_tokens,
    TILE_TOKENS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    REQUESTS: tl.constexpr,
    CUTS: tl.constexpr,
):
    program = tl.program_id(0)
    # Cut every so many blocks, if that is what is asked for; tiles are not together (false).
    chosen, together, least = tl.maximum(-num_splits, 1), num_splits != num_splits, 1
    if num_splits == 0:
        chosen, together = choose_step(
            lengths_ptr,
            kv_ptr,
            num_requests,
            key_start,
            window,
            parts,
            min_blocks,
            head_blocks,
            TILE_TOKENS,
            BLOCK_KEYS,
            REQUESTS,
        )
        # A smaller piece costs more than it takes from its neighbour.
        least = tl.maximum(min_blocks // 2, 1)
    # Tiles of the requests before, and their work: in blocks if cut together, else in parts.
    all_tiles, all_work = 0, 0
    for begin in range(0, num_requests, REQUESTS):
        # [REQUESTS]
        request = begin + tl.arange(0, REQUESTS)
        length, kv_length = load_lengths(
            lengths_ptr, kv_ptr, begin, num_requests, key_start, REQUESTS
        )
        start = tl.load(query_starts_ptr + request, mask=request < num_requests, other=0)
        tiles, blocks = work(length, kv_length, window, TILE_TOKENS, BLOCK_KEYS)
        step = tl.where(num_splits > 0, ceil_div(blocks, tl.maximum(num_splits, 1)), chosen)
        alone = tl.where(num_splits > 0, num_splits, ceil_div(blocks, step))
        each = tl.where(together, blocks + START, alone)
        first_tile = all_tiles + sum_before(tiles)
        first_work = all_work + sum_before(each * tiles)
        most = max_of(tiles)
        for index in range(program, most, tile_programs):
            there = index < tiles
            tile = first_tile + index
            skipped = index * TILE_TOKENS
            tokens = tl.minimum(length - skipped, TILE_TOKENS)
            shared = request < prefixes
            seen = tl.where(shared, kv_length, kv_length - length + 1 + skipped)
            last = tl.minimum(seen + tokens - 1, kv_length)
            keys = tl.minimum(tl.maximum(last, 0), window)
            # The first part that begins at this tile or in it, at which block of its keys, and how
            # many do.
            before = first_work + index * each
            part = tl.where(together, ceil_div(before, step), before)
            block = tl.where(together, part * step - before - START, 0)
            count = tl.where(together, ceil_div(before + each, step) - part, each)
            # Which of them cut the tile: others begin at its ends. All tiles of a request are cut
            # at the same keys, of which one may see the first only.
            first_cut = tl.maximum(ceil_div(least - block, step), 0)
            last_block = tl.minimum(blocks - least, (keys - 1) // BLOCK_KEYS)
            cuts = tl.minimum((last_block - block) // step + 1, count) - first_cut
            cuts = tl.where(last_block < tl.maximum(block, 1), 0, tl.maximum(cuts, 0))
            entry = tile_table_ptr + tile * TABLE_COLUMNS
            tl.store(entry, request, mask=there)
            tl.store(entry + 1, start + skipped, mask=there)
            tl.store(entry + 2, tokens, mask=there)
            tl.store(entry + 3, seen, mask=there)
            tl.store(entry + 4, keys, mask=there)
            tl.store(entry + 5, cuts + 1, mask=there)
            tl.store(entry + 6, part + first_cut - 1, mask=there)
            tl.store(entry + 7, tl.where(shared, num_tokens, 0), mask=there)
            if token_tiles_ptr is not None:
                # [REQUESTS, TILE_TOKENS]
                token = tl.arange(0, TILE_TOKENS)[None, :]
                place = token_tiles_ptr + 2 * (start + skipped) + tl.where(shared, 0, 1)
                mask = there[:, None] & (token < tokens[:, None])
                tl.store(place[:, None] + 2 * token, tile[:, None], mask=mask)
            most_cuts = max_of(tl.where(there, count, 0))
            for one in range(0, most_cuts, CUTS):
                # [REQUESTS, CUTS]
                number = one + tl.arange(0, CUTS)[None, :]
                cut = block[:, None] + number * step[:, None]
                behind = (cut >= least) & (cut > (blocks - least)[:, None])
                entries = starts_ptr + (part[:, None] + number) * 2
                mine = there[:, None] & (number < count[:, None])
                tl.store(entries, tile[:, None] + behind.to(tl.int32), mask=mine)
                tl.store(entries + 1, tl.where(behind | (cut < least), 0, cut), mask=mine)
        all_tiles += sum_of(tiles)
        all_work += sum_of(each * tiles)
    used = tl.where(together, ceil_div(all_work, chosen), all_work)
    for first in range(used, parts + 1, REQUESTS):
        unused = first + tl.arange(0, REQUESTS)
        tl.store(starts_ptr + unused * 2, all_tiles, mask=unused <= parts)
        tl.store(starts_ptr + unused * 2 + 1, 0, mask=unused <= parts)
