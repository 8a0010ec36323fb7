"""Sparse attention of new tokens over the top-k keys of a paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from absorbed_mla.core_attention.types import AttentionOutput
from absorbed_mla.dsa.backend import SparseBackend
from absorbed_mla.dsa.cached_keys import CachedRows
from absorbed_mla.dsa.key_subset import chosen_keys
from absorbed_mla.dsa.sparse_reference import SparseForward, compute_dtype, latent_inputs
from absorbed_mla.fp8_latents import Fp8Latents
from absorbed_mla.inference.backends.reference import last_keys
from absorbed_mla.inference.rows import Rows


@dataclass(frozen=True, eq=False)
class CachedTopKBackend:
    """A ``PagedBackend`` of one call, which runs the implementation of training.

    Attributes:
        sparse: The implementation.
        chosen: Positions in the token's request, int32 [T, topk], ascending, then -1.
    """

    sparse: SparseBackend
    chosen: Tensor

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
        """See ``PagedBackend``; ``sparse`` is the implementation of the mode that is on."""
        assert key_start == 0 and key_end is None, "DSA refuses caches in several parts"
        return self.sparse.forward_cached(q_content, q_rope, cache, rows, self.chosen, scale)


def attend_cached(
    forward: SparseForward,
    q_content: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    rows: Rows,
    chosen: Tensor,
    scale: float,
) -> AttentionOutput:
    """``SparseBackend.forward_cached`` of an implementation over slots, in plain PyTorch."""
    cached = CachedRows(cache)
    row, _ = last_keys(rows, len(q_content))
    slots = cached.slots(chosen, rows.block_table[row])[:, None]
    query = q_content[:, None], q_rope[:, None]
    over = _over_fp8_rows if cache.dtype == torch.uint8 else _over_rows
    out, lse = over(forward, *query, cached.rows, slots, scale)
    return AttentionOutput(out.squeeze(1), lse.squeeze(1))


def _over_rows(forward, q_content, q_rope, kv, slots, scale) -> AttentionOutput:
    return forward(latent_inputs(q_content, q_rope, kv), slots, scale)


def _over_fp8_rows(forward, q_content, q_rope, rows, slots, scale) -> AttentionOutput:
    """Of a cache only the chosen rows are decoded, a chunk of queries at a time.

    With the bits of attention over decoded rows, whose chunks are these.
    """
    latents = Fp8Latents(q_content.shape[-1], q_rope.shape[-1])
    width = q_content.shape[-1] + q_rope.shape[-1]
    out = q_content.new_empty(q_content.shape, dtype=compute_dtype(q_content))
    lse = out.new_empty(out.shape[:3])
    for subset in chosen_keys(slots, width):
        kv = latents.decode(subset.take(rows), q_content.dtype).view(-1, 1, width)
        place = torch.arange(len(kv), dtype=torch.int32, device=kv.device)
        place = place.view(subset.indices.shape).masked_fill(subset.indices < 0, -1)
        part = subset.queries
        found = _over_rows(forward, q_content[part], q_rope[part], kv, place, scale)
        out[part], lse[part] = found
    return AttentionOutput(out, lse)
