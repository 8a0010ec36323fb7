"""Launcher of the Hopper multi-head backward: keys and values of every head."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from absorbed_mla.kernels.hopper.multi_head import content_width
from absorbed_mla.kernels.hopper.multi_head_backward_kernel import attend_multi_head_backward
from absorbed_mla.kernels.hopper.multi_head_backward_rows import query_gradient, starts
from absorbed_mla.kernels.hopper.multi_head_backward_tile import KEYS, QUERIES
from absorbed_mla.kernels.hopper.tensor_map import tensor_map
from absorbed_mla.kernels.launch import launch

_PLAIN = gl.NVMMASharedLayout(0, 32)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Tensor,
    num_buffers: int,
    scale: float,
    window: int | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of what ``forward`` took; programs add to those of queries in any order.

    Args:
        grad_out: [S_q, B, N, V].
        grad_lse: [S_q, B, N], or None where the LSE was not used.
        q: [S_q, B, N, D] in bf16 or fp16; D = 96, 128 or 192.
        k: [S_k, B, N, D].
        v: [S_k, B, N, V]; V = 64 or 128.
        out: [S_q, B, N, V], possibly over more keys than these.
        lse: fp32 [S_q, B, N], over the same keys as ``out``, and of the sink.
        tiles: Of ``key_tiles`` with 128 keys and the length of the key axis, int32 [tiles, 6] on
            the device.
        num_buffers: Buffers of ``tiles``; tiles of one buffer share no key.
        scale: Multiplies the scores; positive.
        window: With which ``key_tiles`` made the tiles.
        sink: As ``forward`` took it, if its gradient is wanted.

    Returns:
        Gradients of q, k and v in their dtype, the keys' summed in fp32; that of the sink, fp32
        [N], or None.
    """
    queries, batch, heads, width = q.shape
    keys, values, content = len(k), v.shape[3], content_width(width)
    grid = len(tiles), heads, batch
    grad_out = grad_out.to(q.dtype)
    *rows, sink_grad = starts(grad_out, grad_lse, out, lse, scale, sink)
    if not all(grid) or not queries:
        zeros = functools.partial(torch.zeros_like, memory_format=torch.contiguous_format)
        return zeros(q), zeros(k), zeros(v), sink_grad
    blocks = -(-queries // QUERIES.value)
    # The kernel adds to it.
    dq = torch.zeros(
        batch * heads, blocks, QUERIES.value * width, dtype=torch.float32, device=q.device
    )
    dtype = q.dtype if num_buffers == 1 else torch.float32
    dk, dv = (torch.empty(num_buffers, *x.shape, dtype=dtype, device=x.device) for x in (k, v))

    def parts(x: Tensor, size: int) -> list[TensorDescriptor]:
        return [tensor_map(x, (size, 1, 1, part)) for part in (content, width - content)]

    launch(
        attend_multi_head_backward,
        grid,
        *parts(q, QUERIES.value),
        tensor_map(grad_out, (QUERIES.value, 1, 1, values)),
        *map(_row_map, rows),
        *parts(k, KEYS.value),
        tensor_map(v, (KEYS.value, 1, 1, values)),
        tiles,
        dq,
        dk,
        dv,
        blocks,
        keys,
        scale / math.log(2),
        scale,
        window,
        num_warps=8,
    )
    if num_buffers > 1:
        dk, dv = (x.sum(0, keepdim=True).to(q.dtype) for x in (dk, dv))
    return query_gradient(dq, q, content, scale), dk[0], dv[0], sink_grad


def _row_map(x: Tensor) -> TensorDescriptor:
    """The map of fp32 [rows, columns], of which a copy loads 64 of a row."""
    return tensor_map(x, (1, QUERIES.value), _PLAIN)
