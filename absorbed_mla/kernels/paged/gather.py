"""Kernel that copies keys of a request from the blocks of a cache to one tensor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens and columns that a program of 128 threads copies.
_TOKENS = 64
_COLUMNS = 64


def gather(cache: Tensor, blocks: Tensor, start: int, end: int, out: Tensor) -> None:
    """Copy the keys at positions ``start`` to ``end``.

    Args:
        cache: [blocks, block_size, width], any strides but for the last dim.
        blocks: The request's blocks in order, int32 [..].
        start: First position; position p is in ``blocks[p // block_size]``.
        end: One past the last.
        out: [end - start, width], any strides but for the last dim.
    """
    if start == end:
        return
    _, block_size, width = cache.shape
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    grid = (triton.cdiv(end - start, _TOKENS), triton.cdiv(width, columns))
    # Triton launches on the current device, whatever the tensors' is.
    with torch.cuda.device_of(out):
        _gather_kernel[grid](
            cache,
            blocks,
            out,
            start,
            end - start,
            block_size,
            width,
            cache.stride(0),
            cache.stride(1),
            blocks.stride(0),
            out.stride(0),
            TOKENS=_TOKENS,
            COLUMNS=columns,
            num_warps=4,
        )


# The blocks of a request are a row of a table.
@triton.jit(do_not_specialize=["start", "count"], do_not_specialize_on_alignment=["blocks_ptr"])
def _gather_kernel(
    cache_ptr,
    blocks_ptr,
    out_ptr,
    start,
    count,
    block_size,
    width,
    stride_block,
    stride_token,
    stride_table,
    stride_out,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    present = token < count
    position = start + token
    block = tl.load(blocks_ptr + position // block_size * stride_table, mask=present, other=0)
    source = block.to(tl.int64) * stride_block
    source += (position % block_size).to(tl.int64) * stride_token
    inside = present[:, None] & (column < width)
    keys = tl.load(cache_ptr + source[:, None] + column, mask=inside)
    tl.store(out_ptr + token[:, None].to(tl.int64) * stride_out + column, keys, mask=inside)
