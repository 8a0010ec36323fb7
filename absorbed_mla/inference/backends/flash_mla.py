"""DeepSeek's FlashMLA as a backend, where a user has installed it.

Source: https://github.com/deepseek-ai/FlashMLA (its Python interface).
Its dense decode takes as many new tokens of every row: shorter rows are padded in front, where its
causal mask, aligned to the last key, leaves the others as they are.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from absorbed_mla.inference.rows import Rows

if TYPE_CHECKING:
    from absorbed_mla.inference.backend import PagedRequest

_BLOCK_SIZE = 64
_WIDTHS = (512, 64)


class FlashMLABackend:
    """See :class:`~absorbed_mla.inference.backend.PagedBackend`; not batch-invariant."""

    name = "flash_mla"

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
        if key_start or (key_end is not None and key_end < rows.max_kv_length):
            raise ValueError(
                "paged_attention_backend='flash_mla' sees the keys of a row from its first on; got "
                f"a part of them, {key_start} to {key_end}"
            )
        assert not batch_invariant, "refused before"
        tokens, length = len(q_content), rows.max_query_length
        if not (tokens and length and len(rows)):
            return torch.zeros_like(q_content), q_content.new_full(
                q_content.shape[:2], -torch.inf, dtype=torch.float32
            )
        # [R, length]: the token of each place; places before a shorter row's first have any
        place = torch.arange(length, device=q_content.device)
        index = place - (length - rows.query_lengths[:, None])
        token = (rows.query_starts[:, None] + index.clamp(min=0)).clamp(max=tokens - 1).long()
        query = torch.cat((q_content, q_rope), dim=-1)[token]
        out, lse = _decode(query, cache, rows, scale, q_content.shape[-1])
        seen = (index >= 0) & (rows.kv_lengths[:, None] - length + place >= 0)
        return _scatter(out, lse.transpose(1, 2), token, seen, tokens)


def _decode(query: Tensor, cache: Tensor, rows: Rows, scale: float, width: int):
    """Output [R, length, N, width] and LSE [R, N, length]."""
    package = importlib.import_module("flash_mla")
    heads = query.shape[1] * query.shape[2]
    # Newer releases ignore the arguments and make the schedule within the call.
    schedule, splits = package.get_mla_metadata(rows.kv_lengths, heads, 1)
    return package.flash_mla_with_kvcache(
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


def _scatter(out: Tensor, lse: Tensor, token: Tensor, seen: Tensor, tokens: int):
    """What was computed for places [R, length], on the token axis; 0 and -inf elsewhere."""
    # One more token, for places that are nobody's: which ones they are, the host does not know.
    target = torch.where(seen, token, tokens).flatten()
    flat_out = out.new_zeros(tokens + 1, *out.shape[2:])
    flat_lse = lse.new_full((tokens + 1, lse.shape[2]), -torch.inf)
    flat_out[target], flat_lse[target] = out.flatten(0, 1), lse.flatten(0, 1)
    return flat_out[:tokens], flat_lse[:tokens]


def refuses(request: PagedRequest) -> str | None:
    """Why FlashMLA cannot do this, or None."""
    checks = {
        "it needs a GPU": request.device.type != "cuda",
        "it computes in bf16": request.dtype != torch.bfloat16,
        "its splits depend on the batch (batch_invariant=True)": request.batch_invariant,
        "it sees all keys of a row, not a part of them": request.windowed,
        f"it needs a block size of {_BLOCK_SIZE}; the cache has {request.block_size}": (
            request.block_size != _BLOCK_SIZE
        ),
        f"widths {request.content} (latent) and {request.rope} (rope) are not {_WIDTHS}": (
            (request.content, request.rope) != _WIDTHS
        ),
    }
    reason = next((reason for reason, holds in checks.items() if holds), None)
    if reason is not None:
        return reason
    if torch.cuda.get_device_capability(request.device) != (9, 0):
        return "it needs compute capability 9.0"
    try:
        importlib.import_module("flash_mla")
    except Exception as error:  # its compiled part raises what it likes
        return f"flash_mla cannot be imported ({type(error).__name__}: {error})"
    return None
