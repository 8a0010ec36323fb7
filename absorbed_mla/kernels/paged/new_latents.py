"""Fused norms, RoPE and KV-cache write of new tokens' latents, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.invariant.rms_norm import WARPS, normed_row
from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.rotation import rotated
from absorbed_mla.kernels.triton.common import interpreted, narrow


class Normed(NamedTuple):
    """Rows that a norm takes, and its parameters.

    Attributes:
        rows: [T, ...], the last axis contiguous; the first channels are normalised.
        weight: Of the norm, one number for each of these channels.
        eps: Added to the mean square.
    """

    rows: Tensor
    weight: Tensor
    eps: float


def new_latents(
    query: Normed,
    keys: Normed,
    cos: Tensor,
    sin: Tensor,
    zero_centered: bool,
    slots: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """The normalised query latents, and [latent | k_rope], normalised and rotated.

    To the bit what ``rms_norm_forward`` and ``rotation.rotate`` give one after the other.

    Args:
        query: Rows [T, Q].
        keys: Rows [T', C + R]; R is a power of two.
        cos: fp32 [T', R / 2].
        sin: Likewise.
        zero_centered: Whether 1 is added to the norms' weights.
        slots: Cache [blocks, block_size, C + R], any strides but for the last axis, and where the
            first rows of the keys go, [P] each: the block, and the position in it. None: nowhere.

    Returns:
        [T, Q] and [T', C + R], contiguous.
    """
    (rows, width), (count, _) = query.rows.shape, keys.rows.shape
    query_out = query.rows.new_empty(query.rows.shape)
    keys_out = keys.rows.new_empty(keys.rows.shape)
    rank, half = len(keys.weight), cos.shape[-1]
    cache, blocks, offsets = slots or (None, None, None)
    # Plain tensors, for which a launch is cheap.
    weights = query.weight.detach(), keys.weight.detach()
    places = 0 if blocks is None else min(len(blocks), count)
    strides = (0, 0) if cache is None else cache.stride()[:2]
    if rows or count:
        # Triton launches on the current device, whatever the tensors' is.
        with torch.cuda.device_of(query_out):
            launch(
                _latents_kernel,
                (max(rows, count), 2),
                *(query.rows, weights[0], query_out, keys.rows, weights[1], keys_out),
                *(cos, sin, cache, blocks, offsets),
                *(rows, width, query.rows.stride(0), query.eps),
                *(count, rank, keys.rows.stride(0), keys.eps, cos.stride(0), sin.stride(0)),
                *(places, *strides),
                Q_BLOCK=triton.next_power_of_2(width),
                C_BLOCK=triton.next_power_of_2(rank),
                HALF=half,
                ZERO_CENTERED=zero_centered,
                WRITES=cache is not None,
                INTERPRETED=interpreted(),
                num_warps=WARPS,
            )
    return query_out, keys_out


@triton.jit(do_not_specialize=["rows", "count", "places"])
def _latents_kernel(
    query_ptr,
    query_weight_ptr,
    query_out_ptr,
    keys_ptr,
    keys_weight_ptr,
    keys_out_ptr,
    cos_ptr,
    sin_ptr,
    cache_ptr,
    blocks_ptr,
    offsets_ptr,
    rows,
    width,
    query_stride,
    query_eps,
    count,
    rank,
    keys_stride,
    keys_eps,
    cos_stride,
    sin_stride,
    places,
    block_stride,
    offset_stride,
    Q_BLOCK: tl.constexpr,
    C_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    WRITES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        if row < rows:
            column = tl.arange(0, Q_BLOCK)
            inside = column < width
            x = tl.load(query_ptr + row * query_stride + column, mask=inside, other=0.0)
            x, weights = x.to(tl.float32), query_weight_ptr + column
            normed, _ = normed_row(x, weights, inside, width, query_eps, ZERO_CENTERED)
            normed = narrow(normed, query_out_ptr.dtype.element_ty, INTERPRETED)
            tl.store(query_out_ptr + row * width + column, normed, mask=inside)
    elif row < count:
        keys_ptr += row * keys_stride
        keys_out_ptr += row * (rank + 2 * HALF)
        column = tl.arange(0, C_BLOCK)
        inside = column < rank
        x = tl.load(keys_ptr + column, mask=inside, other=0.0).to(tl.float32)
        weights = keys_weight_ptr + column
        normed, _ = normed_row(x, weights, inside, rank, keys_eps, ZERO_CENTERED)
        pair = tl.arange(0, HALF)
        cos = tl.load(cos_ptr + row * cos_stride + pair)
        sin = tl.load(sin_ptr + row * sin_stride + pair)
        even = tl.load(keys_ptr + rank + 2 * pair).to(tl.float32)
        odd = tl.load(keys_ptr + rank + 2 * pair + 1).to(tl.float32)
        normed = narrow(normed, keys_out_ptr.dtype.element_ty, INTERPRETED)
        first, second = rotated(even, odd, cos, sin)
        first = narrow(first, keys_out_ptr.dtype.element_ty, INTERPRETED)
        second = narrow(second, keys_out_ptr.dtype.element_ty, INTERPRETED)
        tl.store(keys_out_ptr + column, normed, mask=inside)
        tl.store(keys_out_ptr + rank + pair, first)
        tl.store(keys_out_ptr + rank + HALF + pair, second)
        if WRITES:
            cached = row < places
            block = tl.load(blocks_ptr + row, mask=cached, other=0).to(tl.int64)
            offset = tl.load(offsets_ptr + row, mask=cached, other=0).to(tl.int64)
            cache_ptr += block * block_stride + offset * offset_stride
            tl.store(cache_ptr + column, normed, mask=inside & cached)
            tl.store(cache_ptr + rank + pair, first, mask=cached)
            tl.store(cache_ptr + rank + HALF + pair, second, mask=cached)
