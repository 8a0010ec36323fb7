"""Compiled libraries of FlashMLA and FlashAttention-3: of vLLM, or files taken out of its wheel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.kit.report import Refused
from benchmarks.peers import first_module

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = Path("/tmp/peers")


def flash_mla_operators() -> Any:
    """The namespace of FlashMLA's operators, without a Python package.

    Raises:
        Refused: If there is no library.
    """
    return _operators("_flashmla_C", "sparse_prefill_fwd", "vllm.v1.attention.ops.flashmla")


def flash_attention_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    scale: float,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    cu_seqlens_k: Tensor | None = None,
    lengths_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    block_table: Tensor | None = None,
    num_splits: int = 0,
) -> Tensor:
    """FlashAttention-3's forward, causal (aligned at the ends), [T, N, V].

    Args:
        q: [T, N, K]; with ``qv`` its part beside the value's.
        k: [T_k, N_k, K], or blocks [blocks, block size, N_k, K].
        v: [T_k, N_k, V], or blocks.
        qv: [T, N, V], added to the scores with ``v``; None for none.
        scale: Of the scores.
        cu_seqlens: int32 bounds of the queries' sequences.
        max_seqlen: Longest of them.
        cu_seqlens_k: Bounds of the keys' sequences, or
        lengths_k: their lengths, where a block table says where they are.
        max_seqlen_k: Longest of them; None for ``max_seqlen``.
        block_table: int32 [sequences, blocks].
        num_splits: Of the keys; 0 lets the library choose.

    Raises:
        Refused: If there is no library.
    """
    forward = _operators("_vllm_fa3_C", "fwd", "vllm.vllm_flash_attn").fwd
    longest = max_seqlen if max_seqlen_k is None else max_seqlen_k
    bounds = (cu_seqlens, cu_seqlens_k, None, None, lengths_k, max_seqlen, longest, block_table)
    unused = (None,) * 8  # batch indices, padding, rotation, scales of FP8
    window, softcap, interleaved, schedule, pack_gqa, margin = (-1, -1), 0.0, True, None, None, 0
    return forward(
        *(q, k, v, None, None, qv, None, *bounds, *unused, scale, True, *window, softcap),
        *(interleaved, schedule, num_splits, pack_gqa, margin, None, 1, 0, None),
    )[0]


def require_flash_attention_3() -> None:
    """Load its library.

    Raises:
        Refused: If there is none.
    """
    _operators("_vllm_fa3_C", "fwd", "vllm.vllm_flash_attn")


def _operators(name: str, operator: str, package: str) -> Any:
    """The namespace of a library, which the package loads where it is installed."""
    import torch

    if hasattr(getattr(torch.ops, name), operator):
        return getattr(torch.ops, name)
    library = FOLDER / f"{name}.abi3.so"
    if library.is_file():
        torch.ops.load_library(str(library))
        return getattr(torch.ops, name)
    try:
        first_module(package)
    except Refused as missing:
        raise Refused(f"{missing}; {library} does not exist") from None
    return getattr(torch.ops, name)
