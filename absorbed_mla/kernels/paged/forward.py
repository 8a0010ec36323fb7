"""Paged attention forward: tiles of queries (heads of new tokens), and cached keys of each.

The arithmetic is that of the training kernel, step by step: with the same block sizes and without
splits, the result of a token is bitwise the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.fp8_latents import GROUP, decoded_keys, load_fp8_rows
from absorbed_mla.kernels.paged import plan
from absorbed_mla.kernels.paged.call import PagedCall
from absorbed_mla.kernels.paged.combine import combine, places
from absorbed_mla.kernels.paged.merge_rows import merge_rows
from absorbed_mla.kernels.paged.padding import clear_padding
from absorbed_mla.kernels.paged.schedule import TABLE_COLUMNS, Schedule, schedule
from absorbed_mla.kernels.triton.common import (
    LN_2,
    LOG2_E,
    interpreted,
    load_rows,
    precision,
    rows_contiguous,
    store_rows,
)
from absorbed_mla.kernels.triton.forward import attend_to_keys, normalised
from absorbed_mla.kernels.triton.launch import Blocks


def forward(call: PagedCall, table: Schedule | None = None) -> tuple[Tensor, Tensor]:
    """Attention of new tokens over the cached latents of their requests.

    With ``batch_invariant`` it uses the block sizes of training and no splits.

    Args:
        call: The arguments.
        table: Of the batch, as ``operators.paged_schedule`` makes it for all layers of a step;
            None: it is made.

    Returns:
        Output [T, N, C] in the dtype of the query and LSE [T, N] in fp32; 0 and -inf for a token
        in no request, or that sees no key.
    """
    q_content, q_rope, cache = rows_contiguous(call.q_content, call.q_rope, call.cache)
    call = call._replace(q_content=q_content, q_rope=q_rope, cache=cache)
    (tokens, heads, kv_lora_rank), rope = q_content.shape, q_rope.shape[-1]
    out, lse = call.results(tokens)
    if not call.has_keys:
        return out.zero_(), lse.fill_(float("-inf"))
    if not tokens:
        return out, lse
    division = divide(call)
    tiles, split_kv = division.tiles, division.split_kv
    blocks, warps, resident = _blocks(call)
    table = table or schedule(*call.lengths, call.key_start, division, call.prefixes, tokens)
    shape = (places(split_kv), tiles.head_blocks, blocks.rows)
    waiting = out.new_empty((*shape, kv_lora_rank), dtype=torch.float32), lse.new_empty(shape)
    whole = call.results(call.row_tokens) if call.prefixes else (out, lse)
    parts = keys_of(cache, kv_lora_rank, rope)
    _paged_kernel[(split_kv.parts * tiles.head_blocks,)](
        q_content,
        q_rope,
        *parts,
        call.block_table,
        *whole,
        *waiting,
        *table[:2],
        *q_content.stride()[:2],
        *q_rope.stride()[:2],
        *(stride for part in parts for stride in part.stride()[:2]),
        call.block_table.stride(0),
        call.scale * LOG2_E.value,
        heads,
        tiles.head_blocks,
        C=kv_lora_rank,
        R=rope,
        HB=tiles.heads,
        BLOCK_M=blocks.rows,
        BLOCK_N=blocks.keys,
        BLOCK_SIZE=cache.shape[1],
        GROUP=min(GROUP, kv_lora_rank) if call.fp8 else 0,
        SPLIT=split_kv.splits,
        PRECISION=precision(q_content.dtype),
        INTERPRETED=interpreted(),
        num_warps=warps,
        num_stages=blocks.stages,
        maxnreg=plan.most_registers(resident, warps),
    )
    if call.prefixes:
        merge_rows(waiting, whole, table, tiles, (out, lse))
    elif split_kv.splits:
        combine(*waiting, table, tiles, split_kv, call.lengths[:2], (out, lse))
    else:
        clear_padding(*call.lengths[:2], out, lse)
    return out, lse


def divide(call: PagedCall) -> plan.Division:
    """Query tiles and KV splits of :func:`forward`."""
    tokens, heads = call.row_tokens, call.q_content.shape[1]
    blocks, _, resident = _blocks(call)
    tiles = plan.tiles_for(call.requests, heads, tokens, call.max_query_length, blocks.rows)
    num_splits = 1 if call.batch_invariant else call.num_splits
    device = call.q_content.device
    split_kv = plan.split_kv_for(tiles, call.window, blocks.keys, resident, device, num_splits)
    return plan.Division(tiles, split_kv, blocks.keys, call.window)


def _blocks(call: PagedCall) -> tuple[Blocks, int, int]:
    """Block sizes, warps, and programs that run on a multiprocessor at a time."""
    dtype, device = call.q_content.dtype, call.q_content.device
    widths = call.q_content.shape[-1], call.q_rope.shape[-1]
    rows = None if call.batch_invariant else call.max_query_length * call.q_content.shape[1]
    blocks, warps = plan.blocks_for(dtype, *widths, device, rows, call.fp8)
    return blocks, warps, plan.resident(blocks, *widths, dtype, device)


def keys_of(cache: Tensor, kv_lora_rank: int, rope: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of a cache: latents, their scales in FP8 rows (else any tensor), and k_rope."""
    if cache.dtype != torch.uint8:
        return cache, cache, cache[..., kv_lora_rank:]
    scales = kv_lora_rank + -(-kv_lora_rank // GROUP) * torch.float32.itemsize
    k_rope = scales + rope * torch.bfloat16.itemsize
    return (
        cache,
        cache[..., kv_lora_rank:scales].view(torch.float32),
        cache[..., scales:k_rope].view(torch.bfloat16),
    )


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["block_table_ptr"])
def _paged_kernel(
    q_content_ptr,
    q_rope_ptr,
    latent_ptr,
    scales_ptr,
    k_rope_ptr,
    block_table_ptr,
    out_ptr,
    lse_ptr,
    split_out_ptr,
    split_lse_ptr,
    tiles_ptr,
    starts_ptr,
    stride_qc_t,
    stride_qc_n,
    stride_qr_t,
    stride_qr_n,
    stride_kc_b,
    stride_kc_s,
    stride_sc_b,
    stride_sc_s,
    stride_kr_b,
    stride_kr_s,
    stride_table,
    scale_log2,
    heads,
    head_blocks,
    C: tl.constexpr,
    R: tl.constexpr,
    HB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    head_block, part = tl.program_id(0) % head_blocks, tl.program_id(0) // head_blocks
    first_tile, first_block = tl.load(starts_ptr + 2 * part), tl.load(starts_ptr + 2 * part + 1)
    end_tile, end_block = tl.load(starts_ptr + 2 * part + 2), tl.load(starts_ptr + 2 * part + 3)
    # [BLOCK_M]; a row is a head of a token
    row = tl.arange(0, BLOCK_M)
    head = (head_block * HB + row % HB).to(tl.int64)
    end = end_tile + tl.where(end_block > 0, 1, 0)
    strides = stride_kc_b, stride_kc_s, stride_sc_b, stride_sc_s, stride_kr_b, stride_kr_s
    parts = latent_ptr, scales_ptr, k_rope_ptr, strides
    # There are no registers to keep what is the same for all tiles.
    for tile in tl.range(first_tile, end, disable_licm=True):
        entry = tiles_ptr + tile * TABLE_COLUMNS
        key_start = tl.where(tile == first_tile, first_block, 0) * BLOCK_N
        key_end = tl.load(entry + 4)
        key_end = tl.minimum(key_end, tl.where(tile == end_tile, end_block * BLOCK_N, key_end))
        token, valid = _rows(entry, row // HB, key_start, key_end)
        valid &= head < heads
        last_key = tl.load(entry + 3) - 1 + row // HB  # that the row sees
        # [BLOCK_M, C], [BLOCK_M, R]
        qc = load_rows(q_content_ptr, token * stride_qc_t + head * stride_qc_n, valid, C)
        if R > 0:
            qr = load_rows(q_rope_ptr, token * stride_qr_t + head * stride_qr_n, valid, R)
        else:
            qr = qc

        block_list = block_table_ptr + tl.load(entry).to(tl.int64) * stride_table
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.full([BLOCK_M], 0.0, tl.float32)
        acc = tl.full([BLOCK_M, C], 0.0, tl.float32)
        block = load_blocks(block_list, key_start, key_end, BLOCK_N, BLOCK_SIZE)
        if GROUP:
            raw = _load_fp8(parts, block, key_start, key_end, C, R, BLOCK_N, BLOCK_SIZE, GROUP)
            block = load_blocks(block_list, key_start + BLOCK_N, key_end, BLOCK_N, BLOCK_SIZE)
        for start in range(key_start, key_end, BLOCK_N):
            # [BLOCK_N]
            key = start + tl.arange(0, BLOCK_N)
            there = key < key_end
            # [BLOCK_N, C]; zero beyond the last key, where anything may lie: 0 * NaN is NaN.
            if GROUP:
                kc, kr = decoded_keys(raw, qc.dtype, C, GROUP, INTERPRETED)
                # The pipeliner copies nothing ahead that is not an operand as it lies.
                following = start + BLOCK_N
                raw = _load_fp8(parts, block, following, key_end, C, R, BLOCK_N, BLOCK_SIZE, GROUP)
                ahead = start + 2 * BLOCK_N
            else:
                slots = block.to(tl.int64) * stride_kc_b
                slots += (key % BLOCK_SIZE).to(tl.int64) * stride_kc_s
                kc = load_rows(latent_ptr, slots, there, C)
                kr = kc
                if R > 0:
                    kr = load_rows(k_rope_ptr, slots, there, R)
                ahead = start + BLOCK_N
            # Load the next ones now: the pipeliner prefetches no loads that depend on others.
            block = load_blocks(block_list, ahead, key_end, BLOCK_N, BLOCK_SIZE)
            seen = (key[None, :] <= last_key[:, None]) & there[None, :]
            largest, total, acc = attend_to_keys(
                qc, qr, kc, kr, seen, largest, total, acc, scale_log2, R, PRECISION, INTERPRETED
            )

        acc, lse = normalised(largest, total, acc)
        # Read again: kept over the loop they would not fit into registers.
        token, valid = _rows(entry, row // HB, key_start, key_end)
        valid &= head < heads
        place = token * heads + head
        waits = False
        if SPLIT:
            waits = tl.load(entry + 5, volatile=True) > 1
        if waits:
            place = 2 * part + tl.where(key_start == 0, 1, 0)
            place = (place * head_blocks + head_block).to(tl.int64) * BLOCK_M + row
            store_rows(split_out_ptr, place * C, valid, acc, C, INTERPRETED)
            tl.store(split_lse_ptr + place, lse, mask=valid)
        else:
            place += tl.load(entry + 7).to(tl.int64) * heads
            store_rows(out_ptr, place * C, valid, acc, C, INTERPRETED)
            tl.store(lse_ptr + place, lse * LN_2, mask=valid)


@triton.jit
def _load_fp8(
    parts,
    block,
    start,
    key_end,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """:func:`load_fp8_rows` from ``start`` on, zero from ``key_end`` on.

    Args:
        parts: Pointers to these of the cache, and their strides of blocks and slots.
        block: Of the cache, [BLOCK_N] or one for all.
        start: First key.
        key_end: One past the last.
        C: Bytes of a row.
        R: Width of k_rope.
        BLOCK_N: Keys.
        BLOCK_SIZE: Slots of a block.
        GROUP: Bytes with one scale.
    """
    latent_ptr, scales_ptr, k_rope_ptr, strides = parts
    key = start + tl.arange(0, BLOCK_N)
    block, slot = block.to(tl.int64), (key % BLOCK_SIZE).to(tl.int64)
    values = block * strides[0] + slot * strides[1]
    scales = block * strides[2] + slot * strides[3]
    k_rope = block * strides[4] + slot * strides[5]
    pointers = latent_ptr, scales_ptr, k_rope_ptr
    return load_fp8_rows(pointers, (values, scales, k_rope), key < key_end, C, R, GROUP)


@triton.jit
def _rows(entry, index, key_start, key_end):
    """Tokens of a tile's rows, int64, and which there are.

    None are there where keys of the tile's request follow that none of its tokens sees.
    """
    first, tokens = tl.load(entry + 1, volatile=True), tl.load(entry + 2, volatile=True)
    tokens = tl.where((key_start > 0) & (key_start >= key_end), 0, tokens)
    return (first + index).to(tl.int64), index < tokens


@triton.jit
def load_blocks(block_list, start, end, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Cache blocks of BLOCK_N keys from ``start`` on, [BLOCK_N]; one number if all are in one."""
    if BLOCK_SIZE % BLOCK_N == 0:
        # Keys begin at a multiple of BLOCK_N.
        block = tl.load(block_list + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        key = start + tl.arange(0, BLOCK_N)
        block = tl.load(block_list + key // BLOCK_SIZE, mask=key < end, other=0)
    return block
