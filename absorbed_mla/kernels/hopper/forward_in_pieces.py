"""The Hopper training forward of parity mode in fixed KV splits: sequences as paged requests.

Of at most ``PIECE`` keys it is that of forward.py. Longer sequences are attended to as the decode
kernels attend to a prompt, piece by piece, over latents and k_rope side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from absorbed_mla.kernels.hopper import decode
from absorbed_mla.kernels.hopper.forward import forward
from absorbed_mla.kernels.hopper.pieces import PIECE
from absorbed_mla.kernels.hopper.tile import KEYS
from absorbed_mla.kernels.paged.call import PagedCall
from absorbed_mla.kernels.scratch import not_filled


def forward_in_pieces(
    q_content: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    tiles: Tensor,
    sequences: Tensor,
    blocks: Tensor,
    most_queries: int,
    most_keys: int,
    scale: float,
    largest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``forward``, with the bits of ``decode.forward`` with ``batch_invariant``.

    ``largest`` costs a forward more where a sequence has more than ``PIECE`` keys.

    Args:
        sequences: First query of each, number of queries, and number of keys, of which the last
            query sees all; int32 [3, sequences] on the device.
        blocks: First key of each block of 64 of their keys, int32 [sequences, blocks] on the
            device; beyond the last block any key that is there.
        most_queries: Of a sequence.
        most_keys: Of a sequence.
    """
    operands = q_content, q_rope, latent, k_rope
    if most_keys <= PIECE.value:
        return forward(*operands, tiles, scale, largest)
    if largest is not None:
        forward(*operands, tiles, scale, largest)
    cache = _side_by_side(latent, k_rope)
    lists, most = (*sequences.unbind(0), blocks), (most_queries, most_keys)
    found = [
        decode.forward(PagedCall(*entry, *lists, *most, scale, batch_invariant=True))
        for entry in zip(q_content.unbind(1), q_rope.unbind(1), cache)
    ]
    if len(found) == 1:
        return found[0][0].unsqueeze(1), found[0][1].unsqueeze(1)
    return torch.stack([out for out, _ in found], 1), torch.stack([lse for _, lse in found], 1)


def _side_by_side(latent: Tensor, k_rope: Tensor) -> Tensor:
    """Latents and k_rope of every entry of the batch as blocks of a cache, one from each key on.

    Blocks overlap, so that a sequence may begin at any key. Behind the last key is anything.

    Returns:
        [B, S_k, 64, C + R], strided.
    """
    (keys, batch, width), rope = latent.shape, k_rope.shape[2]
    with not_filled():
        rows = latent.new_empty(batch, keys + KEYS.value - 1, width + rope)
    rows[:, :keys, :width] = latent.transpose(0, 1)
    rows[:, :keys, width:] = k_rope.transpose(0, 1)
    return rows.as_strided(
        (batch, keys, KEYS.value, width + rope), (rows.stride(0), rows.stride(1), rows.stride(1), 1)
    )
