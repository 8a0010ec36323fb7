"""Attention over chosen keys whose bits for a token depend on those keys alone, for parity mode."""

from __future__ import annotations

import triton
from torch import Tensor

from absorbed_mla.kernels.dsa.forward import attend
from absorbed_mla.kernels.dsa.key_lists import HeadTile
from absorbed_mla.kernels.triton.common import rows_contiguous
from absorbed_mla.kernels.triton.launch import launch_for

_LEAST_HEADS = 16


def invariant_forward(
    q_content: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    chosen: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As ``forward``, but every tile has one token and all of its keys, however many tokens.

    Training and generation give a token the same bits if its keys come in the same order.
    """
    q_content, q_rope, latent, k_rope = rows_contiguous(q_content, q_rope, latent, k_rope)
    heads = q_content.shape[2]
    launch = launch_for(q_content.dtype, q_content.shape[3], q_rope.shape[3], q_content.device)
    rows = min(launch.forward.rows, max(_LEAST_HEADS, triton.next_power_of_2(heads)))
    tile = HeadTile(rows, 1, triton.cdiv(heads, rows))
    return attend(q_content, q_rope, latent, k_rope, chosen, scale, q_content.dtype, tile)
