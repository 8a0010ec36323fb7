"""Rotary embedding of the last channels of every head, in place; ``rope.apply_rope``'s kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> None:
    """Rotate, or rotate back, in place.

    Args:
        x: [S, B, N, width], any strides but for the last dim.
        cos: fp32 [S, rope / 2]; rope is a power of two.
        sin: Likewise.
        back: Whether to compute the gradient: halves come in, interleaved pairs go out.
    """
    tokens, batch, heads, width = x.shape
    half = cos.shape[-1]
    if not x.numel():
        return
    block_heads = min(32, triton.next_power_of_2(heads))
    _rotate_kernel[(tokens * batch, triton.cdiv(heads, block_heads))](
        x,
        cos,
        sin,
        batch,
        heads,
        width - 2 * half,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        cos.stride(0),
        sin.stride(0),
        HEADS=block_heads,
        HALF=half,
        BACK=back,
        num_warps=4,
    )


@triton.jit
def _rotate_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    batch,
    heads,
    first_channel,
    stride_s,
    stride_b,
    stride_n,
    stride_cos,
    stride_sin,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BACK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = row // batch
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    # [HALF]
    cos = tl.load(cos_ptr + token * stride_cos + pair)[None, :]
    sin = tl.load(sin_ptr + token * stride_sin + pair)[None, :]
    base = x_ptr + token * stride_s + (row % batch) * stride_b + first_channel
    # [HEADS, 1]
    base += head[:, None].to(tl.int64) * stride_n
    present = head[:, None] < heads
    even_at, odd_at = base + 2 * pair[None, :], base + 2 * pair[None, :] + 1
    first_at, second_at = base + pair[None, :], base + HALF + pair[None, :]
    if BACK:
        # [HEADS, HALF]
        first = tl.load(first_at, mask=present, other=0.0).to(tl.float32)
        second = tl.load(second_at, mask=present, other=0.0).to(tl.float32)
        # Another thread may still have to read what this one is about to write.
        tl.debug_barrier()
        tl.store(even_at, first * cos + second * sin, mask=present)
        tl.store(odd_at, second * cos - first * sin, mask=present)
    else:
        even = tl.load(even_at, mask=present, other=0.0).to(tl.float32)
        odd = tl.load(odd_at, mask=present, other=0.0).to(tl.float32)
        tl.debug_barrier()
        tl.store(first_at, even * cos - odd * sin, mask=present)
        tl.store(second_at, odd * cos + even * sin, mask=present)
