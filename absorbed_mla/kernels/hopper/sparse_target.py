"""Launcher of the Hopper kernel of the indexer's KL target."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from absorbed_mla.kernels.dsa.key_lists import key_lists
from absorbed_mla.kernels.hopper.sparse_forward import rows_of_16_bytes
from absorbed_mla.kernels.hopper.sparse_target_kernel import sum_sparse_probabilities
from absorbed_mla.kernels.hopper.tensor_map import tensor_map
from absorbed_mla.kernels.hopper.tile import ROWS
from absorbed_mla.kernels.launch import launch

# Groups of 64 heads that share the keys that a program gathers, at most.
_GROUPS = 2


def sparse_target(
    operands: tuple[Tensor, Tensor, Tensor, Tensor], lse: Tensor, chosen: Tensor, scale: float
) -> Tensor:
    """The sum over heads of ``exp(scale * query . key - lse)`` for chosen keys.

    Heads are added up in a fixed order: the same bits in every run.

    Args:
        operands: q_content [S_q, B, N, C] in bf16 or fp16, C = 128, 256 or 512, q_rope
            [S_q, B, N, R], R = 64, latent [S_k, B, C] and k_rope [S_k, B, R].
        lse: fp32 [S_q, B, N]; a row of -inf has no probabilities.
        chosen: int32 [S_q, B, topk], -1 for none, anywhere.
        scale: Multiplies the scores.

    Returns:
        fp32 [B, S_q, topk]; 0 where there is no key.
    """
    q_content, q_rope, latent, k_rope = operands
    queries, batch, heads, kv_lora_rank = q_content.shape
    topk, rope = chosen.shape[2], q_rope.shape[3]
    if not chosen.numel() or not heads or not len(latent):
        return lse.new_zeros(batch, queries, topk)
    lists = key_lists(chosen, len(latent), tokens=1)
    groups = min(math.ceil(heads / ROWS.value), _GROUPS)
    programs = math.ceil(heads / (groups * ROWS.value))
    parts = lse.new_empty(programs * groups, batch, queries, topk, dtype=torch.float32)
    launch(
        sum_sparse_probabilities,
        (lists.counts.numel() * programs,),
        tensor_map(q_content, (1, 1, ROWS.value, kv_lora_rank)),
        tensor_map(q_rope, (1, 1, ROWS.value, rope)),
        *rows_of_16_bytes(latent, k_rope),
        *lists[:3],
        lse.contiguous(),
        parts,
        topk,
        queries,
        batch,
        heads,
        scale / math.log(2),
        GROUPS=groups,
        C=kv_lora_rank,
        R=rope,
        num_warps=4,
    )
    return parts[0] if len(parts) == 1 else parts.sum(0)
