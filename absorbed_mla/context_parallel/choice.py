"""Which exchange of latents ``cp_comm_type="auto"`` takes.

Latents are small: all of them are gathered in one message of 576 numbers of a token, where each
head would send 320; every attention call then sees all its keys, and nothing is merged between
ranks. So gathering is mostly faster (docs/measurements/context-parallel.md), and the choice is one
of memory. It depends on numbers that all ranks have, so that all choose the same.
"""

from __future__ import annotations

import torch

from absorbed_mla.dims import MLADims

AUTO = "auto"
# Bytes, for the moment of a layer's attention: the latents of all tokens and, in backward, their
# gradient in fp32 twice, by sequence and by rank. More are fine where they are not more than this
# rank's queries and outputs with their gradients.
_MOST_GATHERED = 2**32


def choose(
    dims: MLADims, local_tokens: int, cp_size: int, dtype: torch.dtype, keep: bool
) -> tuple[str, bool]:
    """The exchange, and whether latents that were gathered are kept for backward.

    Kept latents of all tokens must not take more than the queries and outputs of this rank's
    tokens, which every layer keeps for backward; otherwise they are gathered again there.

    Args:
        dims: Of the layer.
        local_tokens: Of this rank, over all batch entries.
        cp_size: Ranks.
        dtype: Of the latents.
        keep: Whether what is gathered could be kept at all.
    """
    item = torch.finfo(dtype).bits // 8
    gathered = cp_size * local_tokens * dims.kv_down_dim
    own = local_tokens * dims.num_heads_per_rank * (dims.qk_head_dim + dims.v_head_dim)
    if gathered * (item + 2 * 4) > max(_MOST_GATHERED, 2 * item * own):
        return "p2p", False
    return "all_gather", keep and gathered <= own
