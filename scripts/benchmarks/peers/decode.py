"""Decode attention of FlashMLA and of vLLM's FlashAttention-3 over a paged latent cache.

Each function takes the query, the cache and the rows, and returns a function without arguments that
computes the output [T, N, kv_lora_rank]. What it does before, a server does once per step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

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
    """FlashMLA's dense decode, which plans in the first call."""
    import torch

    forward = flash_mla_operators().dense_decode_fwd
    q_content, q_rope, cache, rows, scale = inputs
    _, heads, width = q_content.shape
    query = torch.cat((q_content, q_rope), dim=-1)
    query = query.view(len(rows), rows.max_query_length, heads, -1)
    keys = cache.unsqueeze(2)
    operands = query, keys, width, rows.kv_lengths, rows.block_table, scale, True
    _, _, *plan = forward(*operands, None, None, None)

    def attend() -> Tensor:
        return forward(*operands, *plan[:2], None)[0].view(-1, heads, width)

    return attend


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
