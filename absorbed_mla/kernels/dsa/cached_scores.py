"""The indexer's scores of new tokens and of the keys in the blocks of their requests.

A program has some keys of a request, which are rows of its products, and one token at a time: the
heads are columns, so that they are added up within a thread. With one new token per request the
keys' way from memory takes the time: the token's query stays, and blocks of keys stream by. With
several a block of keys stays for all tokens of a tile that belong to the request.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.dsa.index_scores import fp8_keys
from absorbed_mla.kernels.paged.forward import load_blocks
from absorbed_mla.kernels.triton.common import (
    interpreted,
    load_rows,
    precision,
    product,
    row_sum,
    rows_contiguous,
)

# Keys of a block; blocks of a program with one token; tokens of a tile.
_KEYS, _BLOCKS, _TOKENS = 128, 4, 16
_PLACES = 128
# Numbers of a token's queries beside which three blocks of keys fit shared memory.
_LONG_QUERIES = 2**14
# The widest products that fit shared memory.
MOST_HEADS, MOST_WIDTH = 128, 256


class Tokens(NamedTuple):
    """Where the new tokens belong: int32 [T] each.

    Attributes:
        row: Of the block table; -1 for a token in no row.
        seen: Keys that the token sees, the first ones of its row; -1 likewise.
        row_end: One past the last token of its row; -1 likewise.
    """

    row: Tensor
    seen: Tensor
    row_end: Tensor


def locate(
    query_starts: Tensor,
    query_lengths: Tensor,
    kv_lengths: Tensor,
    max_query_length: int,
    tokens: int,
) -> Tokens:
    """The rows of so many tokens; arguments as in ``inference.rows.Rows``."""
    table = query_starts.new_full((3, tokens), -1, dtype=torch.int32)
    grid = (len(query_starts), triton.cdiv(max_query_length, _PLACES))
    if tokens and all(grid):
        _locate_kernel[grid](
            query_starts, query_lengths, kv_lengths, table, tokens, PLACES=_PLACES, num_warps=4
        )
    return Tokens(*table)


def cached_scores(
    query: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    places: Tokens,
    tokens: slice,
    max_kv_length: int,
    relu: bool,
    *,
    tiles: bool,
) -> Tensor:
    """Scores ``sum_j weights[t, j] * ReLU(query[t, j] . key[s])`` of some tokens.

    Args:
        query: [T, Hi, Di], bf16, fp16 or fp32; Di a power of two from 16 to 256, Hi up to 128. In
            e4m3, with Di at least 32, keys are rounded to it, too.
        weights: fp32 [T, Hi].
        cache: [blocks, block_size, Di]; any strides of blocks and slots.
        block_table: int32 [Q, blocks of a row].
        places: Of all tokens.
        tokens: Which of them, from ``start`` to ``stop``.
        max_kv_length: Most keys of a row.
        relu: Whether products pass a ReLU.
        tiles: Whether a program has some tokens and a block of keys, which pays where rows have
            more than one; else one token and several blocks.

    Returns:
        fp32 [tokens, max_kv_length]; where a token does not see a key, anything.
    """
    query, cache = rows_contiguous(query, cache)
    weights = weights.float()
    _, heads, width = query.shape
    count = tokens.stop - tokens.start
    # Padded rows begin at multiples of 16 bytes.
    padded = -(-max_kv_length // 4) * 4
    out = torch.empty(count, padded, dtype=torch.float32, device=query.device)[:, :max_kv_length]
    keys = _KEYS if tiles else _KEYS * _BLOCKS
    grid = (triton.cdiv(count, _TOKENS) if tiles else count, triton.cdiv(max_kv_length, keys))
    if not out.numel():
        return out
    kernel = _tile_kernel if tiles else _token_kernel
    kernel[grid](
        query,
        weights,
        cache,
        block_table,
        *places,
        out,
        *query.stride()[:2],
        *weights.stride(),
        *cache.stride()[:2],
        block_table.stride(0),
        out.stride(0),
        tokens.start,
        tokens.stop,
        heads,
        DI=width,
        HEADS=max(16, triton.next_power_of_2(heads)),
        KEYS=_KEYS,
        PART=_TOKENS if tiles else keys,
        BLOCK_SIZE=cache.shape[1],
        RELU=relu,
        FP8=query.dtype == torch.float8_e4m3fn,
        PRECISION=precision(query.dtype),
        INTERPRETED=interpreted(),
        num_warps=4,
        num_stages=3 if not tiles and heads * width <= _LONG_QUERIES else 2,
    )
    return out


@triton.jit
def _locate_kernel(
    starts_ptr, lengths_ptr, kv_lengths_ptr, table_ptr, tokens, PLACES: tl.constexpr
):
    """Some tokens of a row."""
    row = tl.program_id(0)
    start, length = tl.load(starts_ptr + row), tl.load(lengths_ptr + row)
    seen_last = tl.load(kv_lengths_ptr + row)
    place = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    token = start + place
    inside = (place < length) & (token < tokens)
    tl.store(table_ptr + token, place * 0 + row, mask=inside)
    tl.store(table_ptr + tokens + token, seen_last - length + place + 1, mask=inside)
    tl.store(table_ptr + 2 * tokens + token, place * 0 + start + length, mask=inside)


@triton.jit
def _load_token(
    query_ptr, weights_ptr, token, q_t, q_h, w_t, w_h, heads, DI: tl.constexpr, HEADS: tl.constexpr
):
    """Query [HEADS, DI] and weights [HEADS] of a token; zeros beyond the last head."""
    head = tl.arange(0, HEADS)
    valid = head < heads
    query = load_rows(query_ptr + token * q_t, head.to(tl.int64) * q_h, valid, DI)
    return query, tl.load(weights_ptr + token * w_t + head * w_h, mask=valid, other=0.0)


@triton.jit
def _load_keys(
    cache_ptr, block, key, there, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr, DI
):
    """Keys [KEYS, DI]; zeros where there are none, for anything may lie there."""
    slot = (key % BLOCK_SIZE).to(tl.int64) * stride_slot
    return load_rows(cache_ptr, block.to(tl.int64) * stride_block + slot, there, DI)


@triton.jit
def _sum_of_heads(keys, query, weight, RELU: tl.constexpr, HOW: tl.constexpr):
    """Scores [KEYS] of one token."""
    found = tl.full([keys.shape[0], query.shape[0]], 0.0, tl.float32)
    found = product(keys, tl.trans(query), found, HOW[0], HOW[1])
    if RELU:
        # Not a maximum, which would take NaN away.
        found = tl.where(found < 0, 0.0, found)
    return row_sum(found * weight[None, :])


@triton.jit
def _token_kernel(
    query_ptr,
    weights_ptr,
    cache_ptr,
    block_table_ptr,
    row_ptr,
    seen_ptr,
    row_end_ptr,
    out_ptr,
    q_t,
    q_h,
    w_t,
    w_h,
    stride_block,
    stride_slot,
    stride_table,
    out_t,
    first,
    last,
    heads,
    DI: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RELU: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One token and PART keys."""
    token = (first + tl.program_id(0)).to(tl.int64)
    row, seen = tl.load(row_ptr + token), tl.load(seen_ptr + token)
    key_start = tl.program_id(1) * PART
    # A token in no row sees -1 keys.
    key_end = tl.minimum(key_start + PART, seen)
    if key_start >= key_end:
        return
    query, weight = _load_token(query_ptr, weights_ptr, token, q_t, q_h, w_t, w_h, heads, DI, HEADS)
    out_ptr += tl.program_id(0).to(tl.int64) * out_t
    block_list = block_table_ptr + row.to(tl.int64) * stride_table
    block = load_blocks(block_list, key_start, key_end, KEYS, BLOCK_SIZE)
    for start in range(key_start, key_end, KEYS):
        key = start + tl.arange(0, KEYS)
        there = key < key_end
        keys = _load_keys(cache_ptr, block, key, there, stride_block, stride_slot, BLOCK_SIZE, DI)
        # As in paged/forward.py.
        block = load_blocks(block_list, start + KEYS, key_end, KEYS, BLOCK_SIZE)
        if FP8:
            keys, scales = fp8_keys(keys, INTERPRETED)
        total = _sum_of_heads(keys, query, weight, RELU, (PRECISION, INTERPRETED))
        if FP8:
            total *= scales
        tl.store(out_ptr + key, total, mask=there)


@triton.jit
def _tile_kernel(
    query_ptr,
    weights_ptr,
    cache_ptr,
    block_table_ptr,
    row_ptr,
    seen_ptr,
    row_end_ptr,
    out_ptr,
    q_t,
    q_h,
    w_t,
    w_h,
    stride_block,
    stride_slot,
    stride_table,
    out_t,
    first,
    last,
    heads,
    DI: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RELU: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """PART tokens, of one or more rows, and a block of keys of each row."""
    token = first + tl.program_id(0) * PART
    last = tl.minimum(token + PART, last)
    key_start = tl.program_id(1) * KEYS
    key = key_start + tl.arange(0, KEYS)
    while token < last:
        row = tl.load(row_ptr + token)
        end = tl.minimum(tl.maximum(tl.load(row_end_ptr + token), token + 1), last)
        # The last token of a row sees most; one in no row sees -1 keys.
        most = tl.load(seen_ptr + end - 1)
        if key_start < most:
            there = key < most
            block_list = block_table_ptr + row.to(tl.int64) * stride_table
            block = load_blocks(block_list, key_start, most, KEYS, BLOCK_SIZE)
            keys = _load_keys(
                cache_ptr, block, key, there, stride_block, stride_slot, BLOCK_SIZE, DI
            )
            if FP8:
                keys, scales = fp8_keys(keys, INTERPRETED)
            for one in range(token, end):
                own = tl.full([], one, tl.int64)
                query, weight = _load_token(
                    query_ptr, weights_ptr, own, q_t, q_h, w_t, w_h, heads, DI, HEADS
                )
                total = _sum_of_heads(keys, query, weight, RELU, (PRECISION, INTERPRETED))
                if FP8:
                    total *= scales
                sees = key < tl.load(seen_ptr + one)
                tl.store(out_ptr + (own - first) * out_t + key, total, mask=sees)
        token = end
