"""The ``triton`` backward in two kernels, without atomics: dQ over keys, then dKV over queries.

Probabilities are computed again from the LSE (FlashAttention, arXiv:2205.14135), once in each
kernel: 7680 FLOP per pair and head at C = 512, R = 64 where 5504 are needed, for the same bits in
every run. The gradients of key and value go into one accumulator, since both are the latent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from absorbed_mla.kernels.latent_backward import LatentBackward
from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.triton.backward_kernels import delta_kernel, key_kernel, query_kernel
from absorbed_mla.kernels.triton.common import interpreted, precision, rows_contiguous, strides_of
from absorbed_mla.kernels.triton.launch import Blocks, launch_for, pack, splits_for

_DELTA_ROWS = 16


def backward(
    call: LatentBackward, query_tiles: Tensor, key_tiles: Tensor, num_buffers: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what ``forward`` took; the same bits in every run.

    Args:
        call: The arguments.
        query_tiles: As in ``forward``.
        key_tiles: Of ``key_tiles`` with ``key_tokens`` tokens and the length of the key axis, int32
            [tiles, 6] on the device.
        num_buffers: Buffers of ``key_tiles``; tiles of one buffer share no key.

    Returns:
        As :class:`LatentBackward` says.
    """
    rows, dq = rows_of(call), call.empty_query_gradients()
    _query_gradients(rows, query_tiles, call.scale, dq)
    return *dq, _key_gradients(rows, key_tiles, num_buffers, call.scale)


def rows_of(call: LatentBackward) -> tuple[Tensor, ...]:
    """Queries, latent, k_rope, the output's gradient, LSE and delta, as the kernels read them."""
    grad_out, grad_lse, out, lse, *operands, _ = call.cast()
    statistics = lse.contiguous(), delta_of(grad_out, grad_lse, out)
    return *rows_contiguous(*operands, grad_out), *statistics


def delta_of(grad_out: Tensor, grad_lse: Tensor | None, out: Tensor) -> Tensor:
    """sum(grad_out * out) - grad_lse of every row, fp32 [S_q, B, N]; part of all its gradients."""
    grad_out, out = rows_contiguous(grad_out, out)
    delta = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
    rows = delta.numel()
    if rows:
        launch(
            delta_kernel,
            (-(-rows // _DELTA_ROWS),),
            grad_out,
            out,
            delta if grad_lse is None else grad_lse.to(torch.float32).contiguous(),
            delta,
            rows,
            *delta.shape[1:],
            *strides_of(grad_out, out),
            C=out.shape[-1],
            BLOCK_M=_DELTA_ROWS,
            WITH_LSE=grad_lse is not None,
        )
    return delta


def _query_gradients(
    operands: tuple[Tensor, ...], tiles: Tensor, scale: float, dq: tuple[Tensor, Tensor]
) -> None:
    """Write the gradients of q_content and q_rope."""
    q_content, q_rope = operands[:2]
    heads, kv_lora_rank = q_content.shape[2:]
    sizes = launch_for(q_content.dtype, kv_lora_rank, q_rope.shape[-1], q_content.device)
    grid = (len(tiles) * (heads // pack(heads, sizes.query.rows).heads), q_content.shape[1])
    if all(grid):
        query_kernel[grid](
            *operands,
            *dq,
            tiles,
            *strides_of(*operands[:-1], *dq),  # delta's are the LSE's
            scale,
            **_constants(operands, sizes.query, sizes.warps),
        )


def _key_gradients(
    operands: tuple[Tensor, ...], tiles: Tensor, num_buffers: int, scale: float
) -> Tensor:
    """Gradients of latent and k_rope side by side, fp32 [S_k, B, C + R]."""
    q_content, _, latent, k_rope = operands[:4]
    keys, batch, kv_lora_rank = latent.shape
    rope = k_rope.shape[-1]
    sizes = launch_for(q_content.dtype, kv_lora_rank, rope, latent.device)
    splits = splits_for(len(tiles), batch, latent.device)
    # Each is written once; they are added up in this order.
    dkv = torch.empty(
        (num_buffers * splits, keys, batch, kv_lora_rank + rope),
        dtype=torch.float32,
        device=latent.device,
    )
    grid = (len(tiles), splits, batch)
    if all(grid):
        key_kernel[grid](
            *operands,
            dkv,
            dkv[..., kv_lora_rank:],
            tiles,
            *strides_of(*operands[:-1], dkv),
            scale,
            **_constants(operands, sizes.key, sizes.warps),
        )
    return dkv[0] if len(dkv) == 1 else dkv.sum(0)


def _constants(operands: tuple[Tensor, ...], blocks: Blocks, warps: int) -> dict:
    """What the two kernels are compiled for, and the number of blocks of heads."""
    q_content, q_rope = operands[:2]
    heads = q_content.shape[2]
    head_block = pack(heads, blocks.rows).heads
    return {
        "head_blocks": heads // head_block,
        "C": q_content.shape[3],
        "R": q_rope.shape[3],
        "HB": head_block,
        "BLOCK_M": blocks.rows,
        "BLOCK_N": blocks.keys,
        "PRECISION": precision(q_content.dtype),
        "INTERPRETED": interpreted(),
        "num_warps": warps,
        "num_stages": blocks.stages,
    }
