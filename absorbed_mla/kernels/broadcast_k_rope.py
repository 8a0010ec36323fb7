"""Kernel that copies the k_rope that all heads share into the key of every head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch

# Values that a program of 128 threads copies.
_NUMBERS = 8192


def broadcast_k_rope(k_rope: Tensor, keys: Tensor) -> None:
    """Write ``k_rope`` to the last channels of all heads.

    Args:
        k_rope: [T, R], R >= 1, the last dim contiguous.
        keys: [T, N, width], contiguous.
    """
    (tokens, heads, width), rope = keys.shape, k_rope.shape[-1]
    # Plain integers: triton.cdiv and next_power_of_2 take the host longer than the launch's grid.
    channels = 1 << (rope - 1).bit_length()
    rows = max(_NUMBERS // channels, 1)
    if not tokens:
        return
    # Triton launches on the current device, whatever the tensors' is.
    with torch.cuda.device_of(keys):
        launch(
            _broadcast_kernel,
            (-(-tokens * heads // rows),),
            k_rope,
            keys,
            tokens * heads,
            heads,
            k_rope.stride(0),
            width,
            ROPE=rope,
            CHANNELS=channels,
            ROWS=rows,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["num_rows"])
def _broadcast_kernel(
    k_rope_ptr,
    keys_ptr,
    num_rows,
    heads,
    stride_token,
    width,
    ROPE: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
):
    # A row is a head of a token; rows lie one after the other. No memory holds 2^31. [ROWS, 1]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    present = (row < num_rows) & (channel < ROPE)
    token = (row // heads).to(tl.int64)
    shared = tl.load(k_rope_ptr + token * stride_token + channel, mask=present)
    end = (row + 1).to(tl.int64) * width
    tl.store(keys_ptr + end - ROPE + channel, shared, mask=present)
