"""Launcher of the Hopper backward of attention over the latent, with atomics."""

from __future__ import annotations

import torch
from torch import Tensor

from absorbed_mla.kernels.hopper.backward_fragments import in_order
from absorbed_mla.kernels.hopper.backward_kernel import attend_backward
from absorbed_mla.kernels.hopper.tensor_map import tensor_map
from absorbed_mla.kernels.hopper.tile import KEYS, tile_shape
from absorbed_mla.kernels.latent_backward import LatentBackward
from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.triton.backward import delta_of

_KEYS = KEYS.value


def backward(call: LatentBackward, tiles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what ``forward`` took; programs add to those of keys in any order.

    Args:
        call: The arguments.
        tiles: As ``forward`` took them.

    Returns:
        As :class:`LatentBackward` says.
    """
    call = call.cast()
    keys, batch, kv_lora_rank = call.latent.shape
    heads, rope = call.q_rope.shape[2:]
    columns = kv_lora_rank + rope
    tokens, packed = tile_shape(heads)
    dq_content, dq_rope = call.empty_query_gradients()
    blocks = -(-keys // _KEYS)
    # The kernel adds to it.
    dkv = call.latent.new_zeros((batch, blocks, _KEYS * columns), dtype=torch.float32)
    programs = len(tiles) * batch * (heads // packed)
    if not programs or not keys:
        return dq_content.zero_(), dq_rope.zero_(), in_order(dkv, columns, keys)
    launch(
        attend_backward,
        (programs,),
        tensor_map(call.q_content, (tokens, 1, packed, kv_lora_rank)),
        tensor_map(call.q_rope, (tokens, 1, packed, rope)),
        tensor_map(call.grad_out, (tokens, 1, packed, kv_lora_rank)),
        tensor_map(call.latent, (_KEYS, 1, kv_lora_rank)),
        tensor_map(call.k_rope, (_KEYS, 1, rope)),
        call.lse.contiguous(),
        delta_of(call.grad_out, call.grad_lse, call.out),
        tiles,
        dq_content,
        dq_rope,
        dkv,
        batch,
        heads,
        blocks,
        call.scale,
        C=kv_lora_rank,
        R=rope,
        HEADS=packed,
        num_warps=8,
    )
    return dq_content, dq_rope, in_order(dkv, columns, keys)
