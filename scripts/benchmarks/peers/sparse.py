"""Sparse attention of FlashMLA, out of the library that vLLM brings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.kit.report import Refused

if TYPE_CHECKING:
    from torch import Tensor

# Where the library lies that was taken out of a wheel, if vLLM is not installed.
LIBRARY = Path("/tmp/peers/_flashmla_C.abi3.so")
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
    import torch
    from torch.nn.functional import pad

    if not hasattr(torch.ops._flashmla_C, "sparse_prefill_fwd"):
        if not LIBRARY.is_file():
            raise Refused(f"FlashMLA's library is not at {LIBRARY}")
        torch.ops.load_library(str(LIBRARY))
    heads = query.shape[1]
    padded = pad(query, (0, 0, 0, -heads % _HEADS))
    forward = torch.ops._flashmla_C.sparse_prefill_fwd
    keys, indices = kv.unsqueeze(1), chosen.unsqueeze(1).contiguous()

    def attend() -> Tensor:
        return forward(padded, keys, indices, scale, 512, None, None, None)[0][:, :heads]

    return attend
