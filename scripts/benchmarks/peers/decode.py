"""Decode attention of FlashMLA and of vLLM's FlashAttention-3 over a paged latent cache.

Each function takes the query, the cache and the rows, and returns a function without arguments that
computes the output [T, N, kv_lora_rank]. What it does before, a server does once per step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.kit.report import Refused
from benchmarks.peers import first_module
from benchmarks.peers.libraries import (
    flash_attention_3,
    flash_mla_operators,
    require_flash_attention_3,
)

if TYPE_CHECKING:
    from torch import Tensor

    from absorbed_mla.inference.rows import Rows


class Inputs(NamedTuple):
    """Of one call; see ``paged_reference``."""

    q_content: Tensor
    q_rope: Tensor
    cache: Tensor
    rows: Rows
    scale: float


Attend = Callable[[], "Tensor"]


def flash_mla(inputs: Inputs) -> Attend:
    """FlashMLA's own package, the copy in vLLM's, or its library alone."""
    try:
        package = first_module("flash_mla", "vllm.v1.attention.ops.flashmla")
    except Refused as missing:
        return _flash_mla_library(inputs, missing)
    _, _, cache, rows, scale = inputs
    query = _flash_mla_query(inputs)
    _, new, heads, _ = query.shape
    width = inputs.q_content.shape[-1]
    schedule, splits = package.get_mla_metadata(rows.kv_lengths, new * heads, 1)

    def attend() -> Tensor:
        out, _ = package.flash_mla_with_kvcache(
            query,
            cache.unsqueeze(2),
            rows.block_table,
            rows.kv_lengths,
            width,
            schedule,
            splits,
            softmax_scale=scale,
            causal=True,
        )
        return out.view(-1, heads, width)

    return attend


def _flash_mla_library(inputs: Inputs, missing: Refused) -> Attend:
    """By its operator, which plans in the first call."""
    try:
        forward = flash_mla_operators().dense_decode_fwd
    except Refused as error:
        raise Refused(f"{missing}; {error}") from None
    query, width = _flash_mla_query(inputs), inputs.q_content.shape[-1]
    keys, rows = inputs.cache.unsqueeze(2), inputs.rows
    operands = query, keys, width, rows.kv_lengths, rows.block_table, inputs.scale, True
    _, _, *plan = forward(*operands, None, None, None)

    def attend() -> Tensor:
        return forward(*operands, *plan[:2], None)[0].view(-1, query.shape[2], width)

    return attend


def _flash_mla_query(inputs: Inputs) -> Tensor:
    """[Q, new tokens, N, C + R]."""
    import torch

    query = torch.cat((inputs.q_content, inputs.q_rope), dim=-1)
    return query.view(len(inputs.rows), inputs.rows.max_query_length, *query.shape[1:])


def vllm_flash_attention_3(inputs: Inputs) -> Attend:
    """FlashAttention-3 with a value part of the query, as vLLM's MLA calls it."""
    import torch

    require_flash_attention_3()
    q_content, q_rope, cache, rows, scale = inputs
    width = q_content.shape[-1]
    ends = torch.arange(len(rows) + 1, dtype=torch.int32, device=cache.device)
    cu_seqlens = ends * rows.max_query_length
    k, v = cache[..., None, width:], cache[..., None, :width]
    return lambda: flash_attention_3(
        *(q_rope, k, v, q_content, scale),
        cu_seqlens=cu_seqlens,
        max_seqlen=rows.max_query_length,
        lengths_k=rows.kv_lengths,
        max_seqlen_k=rows.max_kv_length,
        block_table=rows.block_table,
    )


PEERS: dict[str, Callable[[Inputs], Attend]] = {
    "FlashMLA": flash_mla,
    "vLLM, FlashAttention-3": vllm_flash_attention_3,
}
