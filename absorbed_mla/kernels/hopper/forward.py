"""Launcher of the Hopper forward of attention over the latent."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from absorbed_mla.kernels.hopper.forward_kernel import attend_forward
from absorbed_mla.kernels.hopper.layouts import SWIZZLED
from absorbed_mla.kernels.hopper.tensor_map import tensor_map
from absorbed_mla.kernels.hopper.tile import KEYS, tile_shape
from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.paged.plan import processors

# The latents of a block of keys arrive in so many chunks of columns, or fewer where these would be
# too narrow: two for each half, of which the first is enough to begin.
_CHUNKS = 4


def forward(
    q_content: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    tiles: Tensor,
    scale: float,
    largest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention with scores ``scale * (q_content . latent + q_rope . k_rope)`` and values latent.

    Args:
        q_content: [S_q, B, N, C] in bf16 or fp16; C = 128, 256 or 512.
        q_rope: [S_q, B, N, R]; R = 16, 32 or 64.
        latent: [S_k, B, C].
        k_rope: [S_k, B, R].
        tiles: Of ``query_tiles`` with the tokens of ``tile_shape`` and the length of the query
            axis, int32 [tiles, 5] on the device: what is in no tile is not written.
        scale: Multiplies the scores.
        largest: Gets the largest score of every row, -inf where it sees no key: [S_q, B, N] fp32,
            contiguous; or None.

    Returns:
        Output [S_q, B, N, C] in the dtype of the query and LSE [S_q, B, N] in fp32; 0 and -inf for
        a query that sees no key.

    Raises:
        ValueError: The scale is not positive.
    """
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    queries, batch, heads, kv_lora_rank = q_content.shape
    rope = q_rope.shape[3]
    out = torch.empty_like(q_content, memory_format=torch.contiguous_format)
    lse = torch.empty(queries, batch, heads, dtype=torch.float32, device=q_content.device)
    if not len(latent):
        if largest is not None:
            largest.fill_(-math.inf)
        return out.zero_(), lse.fill_(-math.inf)
    tokens, packed = tile_shape(heads)
    total = len(tiles) * batch * (heads // packed)
    if not total:
        return out, lse
    chunk = max(kv_lora_rank // _CHUNKS, SWIZZLED.value)
    # One program takes all shared memory of a multiprocessor.
    launch(
        attend_forward,
        (min(total, processors(q_content.device)),),
        tensor_map(q_content, (tokens, 1, packed, kv_lora_rank)),
        tensor_map(q_rope, (tokens, 1, packed, rope)),
        tensor_map(latent, (KEYS.value, 1, chunk)),
        tensor_map(k_rope, (KEYS.value, 1, rope)),
        tiles,
        out,
        lse,
        lse if largest is None else largest,
        total,
        batch,
        heads,
        scale / math.log(2),
        HEADS=packed,
        C=kv_lora_rank,
        R=rope,
        RECORD=largest is not None,
        num_warps=4,
    )
    return out, lse
