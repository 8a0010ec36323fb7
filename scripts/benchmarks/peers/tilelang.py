"""Sparse attention by the TileLang kernels in Megatron-Core (``dsa_kernel_backend="tilelang"``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks.kit.report import Refused

if TYPE_CHECKING:
    from torch import Tensor


def tilelang_forward(
    query: Tensor, kv: Tensor, chosen: Tensor, scale: float
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Output [S_q, N, 512] and its LSE of a call.

    Args:
        query: [S_q, N, 576].
        kv: [S_k, 576].
        chosen: int32 [S_q, topk].
        scale: Multiplies the scores.

    Raises:
        Refused: Without TileLang.
    """
    _require_tilelang()
    from megatron.core.transformer.experimental_attention_variant.ops import (
        tilelang_sparse_mla_fwd as kernels,
    )

    operands = query, kv.unsqueeze(1), chosen.unsqueeze(1).contiguous()
    return lambda: kernels.sparse_mla_fwd_interface(*operands, sm_scale=scale)


def tilelang_backward(
    query: Tensor, kv: Tensor, chosen: Tensor, scale: float, grad: Tensor
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Gradients of query and keys, from the saved output; ``grad`` is [S_q, N, 512].

    Raises:
        Refused: Without TileLang.
    """
    out, lse = tilelang_forward(query, kv, chosen, scale)()
    from megatron.core.transformer.experimental_attention_variant.ops import (
        tilelang_sparse_mla_bwd as kernels,
    )

    keys, indices = kv.unsqueeze(1), chosen.unsqueeze(1).contiguous()
    return lambda: kernels.sparse_mla_bwd(query, keys, out, grad, indices, lse, sm_scale=scale)


def _require_tilelang() -> None:
    from megatron.core.transformer.experimental_attention_variant.ops import tilelang_utils

    if not tilelang_utils.HAVE_TILELANG:
        raise Refused("tilelang cannot be imported")
