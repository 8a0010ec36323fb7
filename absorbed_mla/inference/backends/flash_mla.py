"""DeepSeek's FlashMLA as a backend, where a user has installed it.

Source: https://github.com/deepseek-ai/FlashMLA (its Python interface).
Its dense decode takes the same number of new tokens from every request. Shorter requests are padded
in front: its causal mask is aligned to the last key, so padding there changes no other token.
"""

from __future__ import annotations

import importlib
from typing import ClassVar

import torch
from torch import Tensor

from absorbed_mla.inference.backend import PagedRequest, Rates
from absorbed_mla.inference.rows import Rows

_BLOCK_SIZE = 64
# kv_lora_rank and qk_rope_head_dim.
_WIDTHS = (512, 64)


class FlashMLA:
    """See :class:`~absorbed_mla.inference.backend.PagedBackend`; not batch-invariant."""

    name = "flash_mla"
    summary = "the flash-mla package: bf16, compute capability 9.0, blocks of 64 tokens"
    forms = ("absorbed",)
    rates: ClassVar[Rates] = {"NVIDIA H200": (570.0, 570.0)}

    def why_not(self, request: PagedRequest) -> str | None:
        """Why FlashMLA cannot do this, or None."""
        widths = (request.kv_lora_rank, request.qk_rope_head_dim)
        checks = {
            "it needs a GPU": request.device.type != "cuda",
            "it computes in bf16": request.dtype != torch.bfloat16,
            "its dense decode reads latents in bf16": request.latent_cache_dtype != "model",
            "its splits depend on the batch (batch_invariant=True)": request.batch_invariant,
            "it sees all keys of a row, not a part of them": request.windowed,
            f"it needs a block size of {_BLOCK_SIZE}; the cache has {request.block_size}": (
                request.block_size != _BLOCK_SIZE
            ),
            f"widths {widths[0]} (latent) and {widths[1]} (rope) are not {_WIDTHS}": (
                widths != _WIDTHS
            ),
        }
        reason = next((reason for reason, holds in checks.items() if holds), None)
        if reason is not None:
            return reason
        if torch.cuda.get_device_capability(request.device) != (9, 0):
            return "it needs compute capability 9.0"
        try:
            importlib.import_module("flash_mla")
        except Exception as error:  # its compiled part may raise anything
            return f"flash_mla cannot be imported ({type(error).__name__}: {error})"
        return None

    def forward(
        self,
        q_content: Tensor,
        q_rope: Tensor,
        cache: Tensor,
        rows: Rows,
        scale: float,
        key_start: int = 0,
        key_end: int | None = None,
        batch_invariant: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """See :func:`~absorbed_mla.inference.backends.reference.paged_reference`.

        Raises:
            ValueError: If only a part of the keys is to be seen.
        """
        assert not rows.prefixes, "the engine refuses shared prefixes with it"
        if key_start or (key_end is not None and key_end < rows.max_kv_length):
            raise ValueError(
                "paged_attention_backend='flash_mla' sees the keys of a row from its first on; got "
                f"a part of them, {key_start} to {key_end}"
            )
        assert not batch_invariant, "why_not refuses it"
        tokens, length = len(q_content), rows.max_query_length
        if not (tokens and length and len(rows)):
            return torch.zeros_like(q_content), q_content.new_full(
                q_content.shape[:2], -torch.inf, dtype=torch.float32
            )
        # [Q, length]: the token of each place; any token in the padding of a shorter row
        place = torch.arange(length, device=q_content.device)
        index = place - (length - rows.query_lengths[:, None])
        token = (rows.query_starts[:, None] + index.clamp(min=0)).clamp(max=tokens - 1).long()
        query = torch.cat((q_content, q_rope), dim=-1)[token]
        out, lse = _decode(query, cache, rows, scale, q_content.shape[-1])
        seen = (index >= 0) & (rows.kv_lengths[:, None] - length + place >= 0)
        return _scatter(out, lse.transpose(1, 2), token, seen, tokens)


def _decode(query: Tensor, cache: Tensor, rows: Rows, scale: float, kv_lora_rank: int):
    """Output [Q, length, N, C] and LSE [Q, N, length]."""
    package = importlib.import_module("flash_mla")
    heads = query.shape[1] * query.shape[2]
    # Newer releases ignore the arguments and make the schedule within the call.
    schedule, splits = package.get_mla_metadata(rows.kv_lengths, heads, 1)
    return package.flash_mla_with_kvcache(
        query,
        cache.unsqueeze(2),
        rows.block_table,
        rows.kv_lengths,
        kv_lora_rank,
        schedule,
        splits,
        softmax_scale=scale,
        causal=True,
    )


def _scatter(out: Tensor, lse: Tensor, token: Tensor, seen: Tensor, tokens: int):
    """Results of places [Q, length] on the token axis; 0 and -inf for tokens in no place."""
    # Padding writes to one extra token: which places are padding, only the device knows.
    target = torch.where(seen, token, tokens).flatten()
    flat_out = out.new_zeros(tokens + 1, *out.shape[2:])
    flat_lse = lse.new_full((tokens + 1, lse.shape[2]), -torch.inf)
    flat_out[target], flat_lse[target] = out.flatten(0, 1), lse.flatten(0, 1)
    return flat_out[:tokens], flat_lse[:tokens]


ENTRY = FlashMLA()
