"""Kernel of ``rope.apply_rope``: rotates the last channels of every head in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch


def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> None:
    """Rotate, or rotate back, in place.

    Args:
        x: [S, B, N, width], any strides but for the last dim.
        cos: fp32 [S, R / 2]; R is a power of two.
        sin: Likewise.
        back: Whether to compute the gradient: halves come in, interleaved pairs go out.
    """
    tokens, batch, heads, width = x.shape
    half = cos.shape[-1]
    if not x.numel():
        return
    # Plain integers: triton.cdiv and next_power_of_2 take the host longer than the launch's grid.
    block_heads = min(32, 1 << (heads - 1).bit_length())
    # Triton launches on the current device, whatever the tensors' is.
    with torch.cuda.device_of(x):
        launch(
            _rotate_kernel,
            (tokens * batch, -(-heads // block_heads)),
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
    channel = tl.arange(0, 2 * HALF)[None, :]
    # Pairs lie side by side in one order and HALF channels apart in the other; both are read and
    # written in whole rows. Another thread may still have to read what this one is about to write.
    if BACK:
        # [HEADS, HALF]
        first = tl.load(base + pair[None, :], mask=present, other=0.0).to(tl.float32)
        second = tl.load(base + HALF + pair[None, :], mask=present, other=0.0).to(tl.float32)
        even, odd = rotated(first, second, cos, -sin)
        tl.debug_barrier()
        pairs = tl.reshape(tl.join(even, odd), (HEADS, 2 * HALF))
        tl.store(base + channel, pairs, mask=present)
    else:
        x = tl.load(base + channel, mask=present, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(x, (HEADS, HALF, 2)))
        tl.debug_barrier()
        first, second = rotated(even, odd, cos, sin)
        tl.store(base + pair[None, :], first, mask=present)
        tl.store(base + HALF + pair[None, :], second, mask=present)


@triton.jit
def rotated(x, y, cos, sin):
    """(x, y) turned by an angle, in fp32, to the same bits in every kernel.

    Which of two products a sum takes into a fused multiply-add would be the compiler's choice.
    """
    return tl.fma(x, cos, -(y * sin)), tl.fma(y, cos, x * sin)
