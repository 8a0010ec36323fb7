"""Kernels that write and read rows of a latent cache in FP8.

``absorbed_mla/fp8_latents.py`` describes them; the bits are the same as there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.e4m3 import e4m3_bits, from_e4m3
from absorbed_mla.kernels.triton.common import interpreted, load_rows, narrow
from absorbed_mla.kernels.triton_private import elementwise_max

# As in ``absorbed_mla/fp8_latents.py``, which this folder does not import: GROUP, LEAST and
# RECIPROCAL_OF_LARGEST.
GROUP = 128
_LEAST = tl.constexpr(2.0**-100)
_RECIPROCAL = tl.constexpr(1 / 448)
# Tokens of a program of 128 threads.
_TOKENS = 16


def encode(kv: Tensor, values: Tensor, scales: Tensor, k_rope: Tensor) -> None:
    """Write [latent | k_rope] of tokens to rows.

    Args:
        kv: [T, C + R] in any float dtype, columns contiguous like those of the other arguments.
        values: uint8 [T, C], the bits of e4m3.
        scales: fp32 [T, C / 128], rounded up.
        k_rope: bf16 [T, R].
    """
    _launch(_encode_kernel, kv, values, scales, k_rope)


def decode(values: Tensor, scales: Tensor, k_rope: Tensor, kv: Tensor) -> None:
    """The inverse of :func:`encode`: writes ``kv``."""
    _launch(_decode_kernel, kv, values, scales, k_rope)


def _launch(kernel, kv: Tensor, values: Tensor, scales: Tensor, k_rope: Tensor) -> None:
    tokens, width = values.shape
    if not tokens:
        return
    rope = k_rope.shape[-1]
    # The last program of a token has its k_rope.
    grid = (triton.cdiv(tokens, _TOKENS), scales.shape[-1] + bool(rope))
    # Triton launches on the current device, whatever the tensors' is.
    with torch.cuda.device_of(kv):
        kernel[grid](
            kv,
            values,
            scales,
            k_rope,
            tokens,
            *(x.stride(0) for x in (kv, values, scales, k_rope)),
            C=width,
            R=rope,
            GROUP=min(GROUP, triton.next_power_of_2(width)),
            ROPE=triton.next_power_of_2(max(rope, 1)),
            TOKENS=_TOKENS,
            INTERPRETED=interpreted(),
            num_warps=4,
        )


@triton.jit(do_not_specialize=["tokens"])
def _encode_kernel(
    kv_ptr,
    values_ptr,
    scales_ptr,
    rope_ptr,
    tokens,
    stride_kv,
    stride_values,
    stride_scales,
    stride_rope,
    C: tl.constexpr,
    R: tl.constexpr,
    GROUP: tl.constexpr,
    ROPE: tl.constexpr,
    TOKENS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    there, group = token < tokens, tl.program_id(1)
    if group * GROUP < C:
        # [TOKENS, GROUP]
        column = group * GROUP + tl.arange(0, GROUP)[None, :]
        inside = there[:, None] & (column < C)
        wide = tl.load(kv_ptr + (token * stride_kv)[:, None] + column, mask=inside, other=0.0)
        wide = wide.to(tl.float32)
        # As integers, of which those of NaN are the largest.
        bits = wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.reduce(bits, 1, elementwise_max).to(tl.float32, bitcast=True)
        scales = tl.where(largest < _LEAST, _LEAST, largest) * _RECIPROCAL
        values = e4m3_bits(tl.div_rn(wide, scales[:, None]), INTERPRETED)
        tl.store(values_ptr + (token * stride_values)[:, None] + column, values, mask=inside)
        tl.store(scales_ptr + token * stride_scales + group, scales, mask=there)
    else:
        # [TOKENS, ROPE]; other names, since those of both branches have one type.
        channel = tl.arange(0, ROPE)[None, :]
        rotated = there[:, None] & (channel < R)
        source = kv_ptr + (token * stride_kv)[:, None] + C + channel
        rope = tl.load(source, mask=rotated, other=0.0).to(tl.float32)
        rope = narrow(rope, tl.bfloat16, INTERPRETED)
        tl.store(rope_ptr + (token * stride_rope)[:, None] + channel, rope, mask=rotated)


@triton.jit(do_not_specialize=["tokens"])
def _decode_kernel(
    kv_ptr,
    values_ptr,
    scales_ptr,
    rope_ptr,
    tokens,
    stride_kv,
    stride_values,
    stride_scales,
    stride_rope,
    C: tl.constexpr,
    R: tl.constexpr,
    GROUP: tl.constexpr,
    ROPE: tl.constexpr,
    TOKENS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    there, group = token < tokens, tl.program_id(1)
    target = kv_ptr + (token * stride_kv)[:, None]
    if group * GROUP < C:
        # [TOKENS, GROUP]
        column = group * GROUP + tl.arange(0, GROUP)[None, :]
        inside = there[:, None] & (column < C)
        values = tl.load(
            values_ptr + (token * stride_values)[:, None] + column, mask=inside, other=0
        )
        scales = tl.load(scales_ptr + token * stride_scales + group, mask=there, other=0.0)
        latent = from_e4m3(values, INTERPRETED) * scales[:, None]
        latent = narrow(latent, kv_ptr.dtype.element_ty, INTERPRETED)
        tl.store(target + column, latent, mask=inside)
    else:
        channel = tl.arange(0, ROPE)[None, :]
        rotated = there[:, None] & (channel < R)
        source = rope_ptr + (token * stride_rope)[:, None] + channel
        rope = tl.load(source, mask=rotated, other=0.0).to(tl.float32)
        rope = narrow(rope, kv_ptr.dtype.element_ty, INTERPRETED)
        tl.store(target + C + channel, rope, mask=rotated)


@triton.jit
def load_fp8_rows(pointers, rows, there, C: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr):
    """Of N rows: bytes [N, C], scales [N, C / GROUP] and k_rope [N, R]; zero where not ``there``.

    Rows without k_rope have the bytes twice.

    Args:
        pointers: To the parts of a row: values, scales and k_rope.
        rows: Offsets of these, int64 [N] each, of rows that lie multiples of 16 bytes apart.
        there: [N].
        C: Bytes of a row.
        R: Width of k_rope.
        GROUP: Bytes with one scale.
    """
    values = load_rows(pointers[0], rows[0], there, C)
    # Only offsets in bytes say by themselves what they are multiples of.
    scales = load_rows(pointers[1], tl.multiple_of(rows[1], [4]), there, C // GROUP)
    k_rope = values
    if R > 0:
        k_rope = load_rows(pointers[2], tl.multiple_of(rows[2], [8]), there, R)
    return values, scales, k_rope


@triton.jit
def decoded_keys(
    raw, TYPE: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Keys [N, C] and [N, R] of what :func:`load_fp8_rows` returned, in the query's type.

    With the bits of latents that were decoded before.
    """
    values, scales, k_rope = raw
    wide = from_e4m3(values, INTERPRETED)
    wide = tl.reshape(wide, [values.shape[0], C // GROUP, GROUP]) * scales[:, :, None]
    if k_rope.dtype != TYPE:
        k_rope = narrow(k_rope.to(tl.float32), TYPE, INTERPRETED)
    return narrow(tl.reshape(wide, [values.shape[0], C]), TYPE, INTERPRETED), k_rope
