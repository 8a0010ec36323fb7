"""Attention of new tokens over the cached keys that were chosen for them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from absorbed_mla.core_attention.types import AttentionOutput
from absorbed_mla.dsa.backend import SparseBackend
from absorbed_mla.dsa.cached_keys import CachedRows
from absorbed_mla.dsa.sparse_reference import SparseForward, latent_inputs
from absorbed_mla.inference.backends.reference import last_keys
from absorbed_mla.inference.rows import Rows


@dataclass(frozen=True, eq=False)
class OverCachedKeys:
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
    slots = cached.slots(chosen, rows.block_table[row])
    inputs = latent_inputs(q_content[:, None], q_rope[:, None], cached.rows)
    out, lse = forward(inputs, slots[:, None], scale)
    return AttentionOutput(out.squeeze(1), lse.squeeze(1))
