"""Sparse attention of FlashMLA, out of the library that vLLM brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks.peers.libraries import flash_mla_operators

if TYPE_CHECKING:
    from torch import Tensor

_HEADS = 64


def flash_mla(query: Tensor, kv: Tensor, chosen: Tensor, scale: float) -> Callable[[], Tensor]:
    """FlashMLA's sparse prefill; fewer than 64 heads are padded, as its users do.

    Args:
        query: [S_q, N, C + R].
        kv: [S_k, C + R].
        chosen: int32 [S_q, topk].
        scale: Multiplies the scores.

    Returns:
        The attention, whose output is [S_q, N, C].

    Raises:
        Refused: If there is no library.
    """
    from torch.nn.functional import pad

    forward = flash_mla_operators().sparse_prefill_fwd
    heads = query.shape[1]
    padded = pad(query, (0, 0, 0, -heads % _HEADS))
    keys, indices = kv.unsqueeze(1), chosen.unsqueeze(1).contiguous()

    def attend() -> Tensor:
        return forward(padded, keys, indices, scale, 512, None, None, None)[0][:, :heads]

    return attend
