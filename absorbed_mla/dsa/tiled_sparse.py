"""Attention over chosen keys whose result for a token depends on those keys alone, to the bit.

For parity mode: every token has products of its own, of one shape, over tiles of the keys chosen
for it in their order, as in ``core_attention.tiled_reference``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from absorbed_mla.core_attention.tiled_reference import CHUNK_TOKENS, TILE_KEYS, attend_to_tiles
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput


def tiled_sparse_forward(inputs: AttentionInputs, chosen: Tensor, scale: float) -> AttentionOutput:
    """``sparse_forward`` in parity mode; the output has the dtype of the query, as the dense one's.

    Args:
        inputs: In the absorbed form.
        chosen: A selection, int32 [S_q, B, topk].
        scale: Multiplies the scores.
    """
    q_content, q_rope, k_content, k_rope, value = inputs
    assert value is None and k_content.shape[2] == 1, "sparse attention is over the latent"
    compute = torch.promote_types(q_content.dtype, torch.float32)
    tokens, batch, _, width = q_content.shape
    out = q_content.new_empty(q_content.shape)
    lse = q_content.new_empty(q_content.shape[:3], dtype=compute)
    for entry in range(batch):
        for start in range(0, tokens, CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            query = torch.cat((q_content[part, entry], q_rope[part, entry]), dim=-1)
            tiles = _tiles(k_content[:, entry, 0], k_rope[:, entry], chosen[part, entry])
            out[part, entry], lse[part, entry], _ = attend_to_tiles(
                query.to(compute), tiles, scale, width
            )
    return AttentionOutput(out, lse)


def _tiles(k_content: Tensor, k_rope: Tensor, chosen: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The chosen keys, of [S_k, C] and [S_k, R], tile by tile; ``chosen`` is [T, topk]."""
    chosen = torch.nn.functional.pad(chosen, (0, -chosen.shape[1] % TILE_KEYS), value=-1)
    for indices in chosen.split(TILE_KEYS, dim=1):
        seen = indices >= 0
        place = indices.clamp(min=0).long()
        # Not of all keys joined: they may be a whole cache.
        keys = torch.cat((k_content[place], k_rope[place]), dim=-1)
        yield keys.masked_fill_(~seen[..., None], 0.0), seen
