"""Combine the outputs of split-KV by their LSE, in the order of the keys, and clear padding."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.paged.padding import REQUESTS_AT_A_TIME, clear_if_padding
from absorbed_mla.kernels.paged.plan import SplitKV, Tiles
from absorbed_mla.kernels.paged.schedule import TABLE_COLUMNS, Schedule
from absorbed_mla.kernels.triton.common import LN_2, interpreted, narrow
from absorbed_mla.kernels.triton_private import elementwise_max, sum_combine

# Columns of a row of the output that are combined at a time, and for how many rows times splits a
# program of 128 threads loads them at once: with few splits many rows, with many splits one.
_COLUMNS = 64
_LOADED = tl.constexpr(32)
_FEW = tl.constexpr(4)
# Programs for each attention program that runs at a time: a program takes several rows.
_PROGRAMS = 32


def combine(
    split_out: Tensor,
    split_lse: Tensor,
    table: Schedule,
    tiles: Tiles,
    split_kv: SplitKV,
    requests: tuple[Tensor, Tensor],
    result: tuple[Tensor, Tensor],
    *,
    in_order: bool = False,
) -> None:
    """Write output and LSE of the tokens whose keys were split, and of those in no request.

    The places where splits wait share the work of combining, each tile's equally: it takes as long
    for one long request as for many.

    Args:
        split_out: Fp32 [places, head blocks, rows of a tile, C]; read where a split has keys.
        split_lse: Fp32 [places, head blocks, rows of a tile], base 2.
        table: Of the batch.
        tiles: Tiles of the queries.
        split_kv: Bounds of the parts.
        requests: Where each begins on the token axis, and its new tokens; int32 [Q] each.
        result: Output [T, N, C] and LSE [T, N], contiguous.
        in_order: Add split after split, as parity mode does (``hopper/pieces.py``); else some
            together.
    """
    out, lse = result
    tokens, heads, kv_lora_rank = out.shape
    columns = min(kv_lora_rank, _COLUMNS)
    # Of a tile in two parts: its rows, in pieces of so many columns.
    share = min(tiles.tokens, tiles.max_tokens) * heads * (kv_lora_rank // columns) // 2
    most = max(_PROGRAMS * split_kv.programs // places(split_kv), 1)
    programs = max(min(-(-share * _FEW.value // _LOADED.value), most), 1)
    launch(
        _combine_kernel,
        (places(split_kv) + -(-tokens // programs), programs),
        split_out,
        split_lse,
        out,
        lse,
        *table[:2],
        *requests,
        len(requests[0]),
        places(split_kv),
        tokens,
        heads,
        tiles.head_blocks,
        HEADS=tiles.heads,
        TOKENS=tiles.tokens,
        C=kv_lora_rank,
        COLUMNS=columns,
        REQUESTS=REQUESTS_AT_A_TIME,
        IN_ORDER=in_order,
        INTERPRETED=interpreted(),
        num_warps=4,
    )


def places(split_kv: SplitKV) -> int:
    """Where results of splits may wait to be combined; 0 without splits. See ``schedule``."""
    return 2 * split_kv.parts if split_kv.splits else 0


@triton.jit(
    do_not_specialize=["num_requests", "num_places", "num_tokens"],
    do_not_specialize_on_alignment=["query_starts_ptr", "lengths_ptr"],
)
def _combine_kernel(
    split_out_ptr,
    split_lse_ptr,
    out_ptr,
    lse_ptr,
    tiles_ptr,
    starts_ptr,
    query_starts_ptr,
    lengths_ptr,
    num_requests,
    num_places,
    num_tokens,
    heads,
    head_blocks,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    REQUESTS: tl.constexpr,
    IN_ORDER: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    if tl.program_id(0) >= num_places:
        token = (tl.program_id(0) - num_places) * tl.num_programs(1) + tl.program_id(1)
        if token < num_tokens:
            requests = query_starts_ptr, lengths_ptr, num_requests
            clear_if_padding(requests, out_ptr, lse_ptr, token, heads, REQUESTS, C, INTERPRETED)
        return
    part, begins = tl.program_id(0) // 2, tl.program_id(0) % 2
    # The tile that is cut where the part begins, or ends.
    cut = starts_ptr + 2 * (part + begins)
    tile, block = tl.load(cut), tl.load(cut + 1)
    if block == 0:
        return
    entry = tiles_ptr + tile * TABLE_COLUMNS
    first, tokens, count = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 5)
    first_part = tl.load(entry + 6)
    number = part - first_part
    if (number >= count) | ((begins == 1) & (number > 0)) | (count == 1):
        return
    pieces = tokens * heads * (C // COLUMNS)
    begin, end = pieces * number // count, pieces * (number + 1) // count
    places = (first_part, count, head_blocks)
    sources, results = (split_out_ptr, split_lse_ptr), (out_ptr, lse_ptr)
    if IN_ORDER:
        _combine_pieces(
            sources, results, places, first, heads, begin, end, HEADS, TOKENS, C, COLUMNS, 1,
            INTERPRETED,
        )  # fmt: skip
    elif count <= _FEW:
        _combine_pieces(
            sources, results, places, first, heads, begin, end, HEADS, TOKENS, C, COLUMNS, _FEW,
            INTERPRETED,
        )  # fmt: skip
    else:
        _combine_pieces(
            sources, results, places, first, heads, begin, end, HEADS, TOKENS, C, COLUMNS, _LOADED,
            INTERPRETED,
        )  # fmt: skip


@triton.jit
def _combine_pieces(
    sources,
    results,
    places,
    first,
    heads,
    begin,
    end,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Combine pieces ``begin`` to ``end`` of a tile's rows; each has COLUMNS columns.

    Args:
        sources: Outputs and LSE of splits.
        results: Output and LSE.
        places: The tile's first part, how many it is in, and tiles for all heads of a token.
        first: Its first token.
        heads: N.
        begin: A piece.
        end: One past the last.
        HEADS: Heads in a tile.
        TOKENS: Tokens in a tile.
        C: ``kv_lora_rank``.
        COLUMNS: Of a piece.
        SPLITS: Loaded at once, and added up before they are added to the others.
        INTERPRETED: Whether this runs in the interpreter.
    """
    split_out_ptr, split_lse_ptr = sources
    out_ptr, lse_ptr = results
    first_part, count, head_blocks = places
    ROWS: tl.constexpr = _LOADED // SPLITS
    PIECES: tl.constexpr = C // COLUMNS
    stride = tl.num_programs(1) * ROWS
    for one in range(begin + tl.program_id(1) * ROWS, end, stride):
        # [ROWS]: pieces of heads of tokens as they lie in the output, and in a tile.
        piece = one + tl.arange(0, ROWS)
        inside = piece < end
        index = piece // PIECES
        token, head = index // heads, index % heads
        place_in_tile = head // HEADS * (TOKENS * HEADS) + token * HEADS + head % HEADS
        # [ROWS, COLUMNS]
        column = (piece % PIECES * COLUMNS)[:, None] + tl.arange(0, COLUMNS)[None, :]
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.full([ROWS], 0.0, tl.float32)
        acc = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
        # In an order that depends on the number of splits only.
        for start in range(0, count, SPLITS):
            split = start + tl.arange(0, SPLITS)
            place = 2 * (first_part + split) + tl.where(split == 0, 1, 0)
            # [ROWS, SPLITS]
            source = place.to(tl.int64)[None, :] * (head_blocks * TOKENS * HEADS)
            source += place_in_tile[:, None]
            there = (split < count)[None, :] & inside[:, None]
            lse = tl.load(split_lse_ptr + source, mask=there, other=float("-inf"))
            # [ROWS, SPLITS, COLUMNS]
            values = tl.load(
                split_out_ptr + source[:, :, None] * C + column[:, None, :],
                mask=there[:, :, None],
                other=0.0,
            )
            higher = tl.maximum(top, tl.reduce(lse, 1, elementwise_max))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            decay = tl.exp2(top - shift)
            weight = tl.exp2(lse - shift[:, None])
            weights = tl.reduce(weight, 1, sum_combine)
            weighted = tl.reduce(values * weight[:, :, None], 1, sum_combine)
            # One split at a time: compilers may not choose what is rounded, parity depends on it.
            total = tl.fma(total, decay, weights)
            acc = tl.fma(acc, decay[:, None].broadcast_to(ROWS, COLUMNS), weighted)
            top = higher
        blind = total == 0.0
        out = acc / tl.where(blind, 1.0, total)[:, None]
        row = first.to(tl.int64) * heads + index
        pointers = out_ptr + row[:, None] * C + column
        tl.store(pointers, narrow(out, out_ptr.dtype.element_ty, INTERPRETED), mask=inside[:, None])
        value = tl.where(blind, float("-inf"), (top + tl.log2(total)) * LN_2)
        tl.store(lse_ptr + row, value, mask=inside & (piece % PIECES == 0))
