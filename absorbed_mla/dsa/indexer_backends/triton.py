"""The indexer's selection and loss by this package's Triton kernels."""

from __future__ import annotations

from functools import partial

from absorbed_mla.core_attention.backends.triton import ENTRY as DENSE
from absorbed_mla.dsa.backend import SparseRequest
from absorbed_mla.dsa.batch_invariant_indexer import InvariantIndexer
from absorbed_mla.dsa.indexer_loss import indexer_loss
from absorbed_mla.dsa.indexer_triton import TRITON_PIECES
from absorbed_mla.dsa.selection_triton import triton_select, triton_select_cached
from absorbed_mla.dsa.sparse_kernels import dense_request

_WIDTHS = (16, 32, 64, 128, 256)
_MOST_HEADS = 128
# See kernels/dsa/radix_select.py.
_MOST_KEYS = 8192


class TritonBackend:
    """See ``kernels/dsa``; the same bits in every run with deterministic algorithms."""

    name = "triton"
    summary = "this package's Triton kernels, compute capability 8.0 or newer"
    speed = 2.0
    invariant: InvariantIndexer | None = InvariantIndexer()
    select = staticmethod(triton_select)
    select_cached = staticmethod(triton_select_cached)
    loss = staticmethod(partial(indexer_loss, pieces=TRITON_PIECES))
    gathers_keys = False

    def why_not(self, request: SparseRequest) -> str | None:
        """See ``IndexerBackend``; the loss computes the attention's probabilities, too."""
        checks = {
            f"dsa_indexer_head_dim must be one of {_WIDTHS}, it is {request.index_dim}": (
                request.index_dim not in _WIDTHS
            ),
            f"dsa_indexer_n_heads must be at most {_MOST_HEADS}, it is {request.index_heads}": (
                request.index_heads > _MOST_HEADS
            ),
            f"dsa_indexer_topk must be at most {_MOST_KEYS}, it is {request.topk}": (
                request.topk > _MOST_KEYS
            ),
        }
        reason = DENSE.why_not(dense_request(request))
        return reason or next((why for why, holds in checks.items() if holds), None)


ENTRY = TritonBackend()
