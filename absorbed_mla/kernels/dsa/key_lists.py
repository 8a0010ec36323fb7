"""Lists of keys that tiles go through: those that one or more neighbouring tokens have chosen.

A tile has rows for all heads of its tokens. With 64 heads or more that is one token, and its list
is the selection itself. With 16 heads four tokens fill the same rows; their list is the union of
their keys, each with a bit for every token that has chosen it. Trained models choose nearly the
same keys for neighbours, so that the union is little longer than one selection.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.triton_private import elementwise_max, sum_combine

# An entry is key + (bits of the tokens << 27), or the key alone where a tile has one token.
KEY_BITS = tl.constexpr(27)
KEY_MASK = tl.constexpr((1 << 27) - 1)
# Bits beside the key in a positive int32.
MOST_TOKENS = 4
# Heads of a token that a tile has rows for, at least: the smallest product of tensor cores.
_LEAST_HEADS = 16
# Tokens that are next to each other but of different requests share nothing, and each list costs a
# pass over the flags of all keys: lists are united for prefill and training, over so many keys.
_LEAST_QUERIES, _MOST_KEYS = 1024, 2**18
# Programs that unite; each has a row of flags, one byte for each key.
_MOST_PROGRAMS = 1056


class HeadTile(NamedTuple):
    """How the rows of a tile are made of heads and tokens.

    Attributes:
        heads: Rows of a token; beyond the last head they are left out.
        tokens: Tokens of a tile, next to each other.
        blocks: Tiles for all heads of a token.
    """

    heads: int
    tokens: int
    blocks: int


def head_tile(num_heads: int, rows: int) -> HeadTile:
    """The tile of so many heads in ``rows`` rows, a power of two from 16 on."""
    heads = min(num_heads & -num_heads, rows)
    if heads < _LEAST_HEADS:
        heads = min(rows, max(_LEAST_HEADS, triton.next_power_of_2(num_heads)))
    tokens = min(MOST_TOKENS, rows // heads)
    return HeadTile(heads, tokens, triton.cdiv(num_heads, heads))


def query_tile(num_heads: int, rows: int, queries: int, num_keys: int, least: int) -> HeadTile:
    """The tile for so many queries and keys: of several tokens only where that can pay.

    Args:
        num_heads: N.
        rows: Of a tile, at most.
        queries: S_q.
        num_keys: S_k.
        least: Rows of a tile with one token, at least.
    """
    tile = head_tile(num_heads, rows)
    if tile.tokens == 1 or (queries >= _LEAST_QUERIES and num_keys <= _MOST_KEYS):
        return tile
    return token_tile(num_heads, rows, least)


def token_tile(num_heads: int, rows: int, least: int) -> HeadTile:
    """The tile of one token; arguments as of :func:`query_tile`."""
    heads = min(rows, max(least, triton.next_power_of_2(num_heads)))
    return HeadTile(heads, 1, triton.cdiv(num_heads, heads))


class KeyLists(NamedTuple):
    """The keys of every tile.

    Attributes:
        entries: int32 [tiles, B, L], contiguous; negative (or beyond the count) for none.
        counts: int32 [tiles, B]: entries up to the last one that is there.
        open_counts: int32 [tiles, B]: how many of these, from the first on, all tokens have chosen,
            or fewer.
        tokens: Of a tile; the last has fewer where they do not divide the query axis.
    """

    entries: Tensor
    counts: Tensor
    open_counts: Tensor
    tokens: int


def key_lists(chosen: Tensor, num_keys: int, tokens: int, splits: int = 1) -> KeyLists:
    """The lists of a selection.

    Args:
        chosen: int32 [S_q, B, topk], no key twice for a query; negative for none, anywhere.
        num_keys: S_k.
        tokens: Of a tile: 1, 2 or 4.
        splits: Equal parts of the keys of every query, in place of the batch; B = 1 if several.

    Raises:
        ValueError: If an entry has no room for the keys' numbers and the tokens' bits.
    """
    chosen = chosen.contiguous()
    if splits > 1:
        chosen = chosen.view(len(chosen), splits, chosen.shape[-1] // splits)
    queries, batch, topk = chosen.shape
    tiles = triton.cdiv(queries, tokens)
    if not tiles or not batch or not topk:
        counts = chosen.new_zeros(tiles, batch)
        return KeyLists(chosen.new_empty(tiles, batch, 0), counts, counts, tokens)
    if tokens == 1:
        counts, open_counts = chosen.new_empty(2, tiles, batch)  # the kernel fills both
        _count_kernel[(queries * batch,)](
            chosen, counts, open_counts, topk, BLOCK=triton.next_power_of_2(topk), num_warps=4
        )
        return KeyLists(chosen, counts, open_counts, tokens)
    if num_keys > KEY_MASK.value:
        raise ValueError(f"tiles of {tokens} tokens take up to 2**27 - 1 keys, got {num_keys}")
    counts, open_counts = chosen.new_zeros(2, tiles, batch)
    entries = chosen.new_empty(tiles, batch, min(tokens * topk, num_keys))
    programs = min(tiles * batch, _MOST_PROGRAMS if chosen.is_cuda else 2)
    flags = torch.empty(programs, num_keys, dtype=torch.uint8, device=chosen.device)
    _unite_kernel[(programs,)](
        chosen,
        flags,
        entries,
        counts,
        queries,
        batch,
        topk,
        num_keys,
        entries.shape[2],
        tiles,
        TOKENS=tokens,
        BLOCK=min(2048, triton.next_power_of_2(max(num_keys, topk))),
        num_warps=8,
    )
    return KeyLists(entries, counts, open_counts, tokens)


@triton.jit
def _count_kernel(chosen_ptr, counts_ptr, open_counts_ptr, topk, BLOCK: tl.constexpr):
    """How many entries there are up to the last key of a query, and before the first hole."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    key = tl.load(chosen_ptr + row * topk + place, mask=place < topk, other=-1)
    last, hole = last_and_hole(key, place, topk)
    tl.store(counts_ptr + row, last)
    tl.store(open_counts_ptr + row, hole)


@triton.jit
def last_and_hole(key, place, length):
    """One past the last key of a list [BLOCK], and where its first hole is, at most ``length``."""
    last = tl.reduce(tl.where(key >= 0, place + 1, 0), 0, elementwise_max)
    hole = tl.reduce(tl.where(key < 0, place, length), 0, smaller)
    return last, hole


@triton.jit
def smaller(a, b):
    """For a reduction."""
    return tl.where(a < b, a, b)


@triton.jit
def _unite_kernel(
    chosen_ptr,
    flags_ptr,
    entries_ptr,
    counts_ptr,
    queries,
    batch,
    topk,
    num_keys,
    length,
    tiles,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Unite the keys of the tokens of some tiles, in ascending order."""
    flags_ptr += tl.program_id(0).to(tl.int64) * num_keys
    place = tl.arange(0, BLOCK)
    for index in range(tl.program_id(0), tiles * batch, tl.num_programs(0)):
        number = tl.full([], index, tl.int64)
        for start in range(0, num_keys, BLOCK):
            nothing = tl.full([BLOCK], 0, tl.uint8)
            tl.store(flags_ptr + start + place, nothing, mask=start + place < num_keys)
        tl.debug_barrier()
        for token in tl.static_range(TOKENS):
            query = number // batch * TOKENS + token
            row = chosen_ptr + (query * batch + number % batch) * topk
            for start in range(0, topk, BLOCK):
                inside = (start + place < topk) & (query < queries)
                key = tl.load(row + start + place, mask=inside, other=-1)
                flag = tl.load(flags_ptr + key, mask=key >= 0, other=0)
                tl.store(flags_ptr + key, (flag | (1 << token)).to(tl.uint8), mask=key >= 0)
            # The keys of one token differ, those of two may not.
            tl.debug_barrier()
        count = 0
        list_ptr = entries_ptr + number * length
        for start in range(0, num_keys, BLOCK):
            key = start + place
            flag = tl.load(flags_ptr + key, mask=key < num_keys, other=0).to(tl.int32)
            there = (flag != 0).to(tl.int32)
            before = tl.associative_scan(there, 0, sum_combine) - there
            tl.store(list_ptr + count + before, key + (flag << 27), mask=flag != 0)
            count += tl.reduce(there, 0, sum_combine)
        tl.store(counts_ptr + number, count)
        tl.debug_barrier()
