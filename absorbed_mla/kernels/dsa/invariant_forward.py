"""Attention over chosen keys whose bits for a token depend on those keys alone, for parity mode.

Every tile has one token and all of its keys, however many tokens there are: training and generation
give a token the same bits if its keys come in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from absorbed_mla.kernels.dsa.forward import attend_to_lists
from absorbed_mla.kernels.dsa.key_lists import KeyLists, key_lists, token_tile
from absorbed_mla.kernels.triton.common import rows_contiguous
from absorbed_mla.kernels.triton.launch import launch_for


def invariant_forward(
    q_content: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    chosen: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As ``forward``."""
    lists = partial(key_lists, chosen)
    return attend(q_content, q_rope, latent, k_rope, lists, chosen.shape[2], scale)


def attend(
    q_content: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    lists_of: Callable[[int, int, int], KeyLists],
    _topk: int,
    scale: float,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``forward.attend``; FP8 rows in the blocks of training."""
    operands = rows_contiguous(q_content, q_rope, latent, k_rope)
    heads, kv_lora_rank = q_content.shape[2:]
    launch = launch_for(q_content.dtype, kv_lora_rank, q_rope.shape[3], q_content.device)
    tile = token_tile(heads, launch.forward.rows, least=16)
    lists = lists_of(len(latent), tile.tokens, 1)
    keys = launch.forward.keys
    return attend_to_lists(*operands, scales, lists, tile, keys, scale, q_content.dtype)
