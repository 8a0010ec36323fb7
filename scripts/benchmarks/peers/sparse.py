"""Sparse attention of FlashMLA, out of vLLM's library, and of TileLang's kernels in Megatron-Core.

Arguments of all: query [S_q, N, C + R], keys [S_k, C + R], chosen int32 [S_q, topk], and what
multiplies the scores.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.kit.report import Refused
from benchmarks.peers.libraries import flash_mla_operators

if TYPE_CHECKING:
    from torch import Tensor

_HEADS = 64
_OPS = "megatron.core.transformer.experimental_attention_variant.ops"


def flash_mla(query: Tensor, kv: Tensor, chosen: Tensor, scale: float) -> Callable[[], Tensor]:
    """FlashMLA's sparse prefill, [S_q, N, C]; fewer than 64 heads are padded, as its users do.

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


def tilelang_forward(
    query: Tensor, kv: Tensor, chosen: Tensor, scale: float
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Output [S_q, N, 512] and its LSE of a call (``dsa_kernel_backend="tilelang"``).

    Raises:
        Refused: Without TileLang.
    """
    kernels = _tilelang("fwd")
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
    kernels, keys, indices = _tilelang("bwd"), kv.unsqueeze(1), chosen.unsqueeze(1).contiguous()
    return lambda: kernels.sparse_mla_bwd(query, keys, out, grad, indices, lse, sm_scale=scale)


def _tilelang(way: str) -> Any:
    if not importlib.import_module(f"{_OPS}.tilelang_utils").HAVE_TILELANG:
        raise Refused("tilelang cannot be imported")
    return importlib.import_module(f"{_OPS}.tilelang_sparse_mla_{way}")
