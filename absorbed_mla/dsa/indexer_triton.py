"""The indexer's loss by Triton kernels: KL target, scores and gradients of index vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from absorbed_mla.core_attention.backends.triton import ENTRY as DENSE
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.core_attention.types import AttentionInputs
from absorbed_mla.dsa.backend import SparseBackend
from absorbed_mla.dsa.backends.triton import ENTRY as SPARSE
from absorbed_mla.dsa.index_vectors import IndexVectors
from absorbed_mla.dsa.indexer_loss import LossPieces
from absorbed_mla.dsa.key_subset import ChosenKeys, VisibleKeys
from absorbed_mla.dsa.selection_triton import triton_index_scores


class TritonHeadSum:
    """The attention's probabilities summed over heads, as ``indexer_loss.HeadSum``, fp32."""

    sparse: SparseBackend = SPARSE

    def __init__(
        self, inputs: AttentionInputs, lse: Tensor | None, scale: float, dtype: torch.dtype
    ) -> None:
        assert dtype == torch.float32, "the weights of an indexer in fp32, bf16 or fp16 are fp32"
        self.inputs, self.scale = inputs, scale
        self.lse = None if lse is None else lse.float()

    def __call__(self, subset: VisibleKeys | ChosenKeys) -> Tensor:
        """See ``HeadSum``."""
        from absorbed_mla.kernels.dsa.kl_target import visible_target

        lse = self.lse
        if lse is None:
            lse = self.inputs.q_content.new_empty(
                self.inputs.q_content.shape[:3], dtype=torch.float32
            )
            lse[subset.queries] = self._lse(subset)
        q_content, q_rope, k_content, k_rope, _ = self.inputs
        operands = q_content, q_rope, k_content.squeeze(2), k_rope
        with torch.cuda.device_of(lse):
            if isinstance(subset, VisibleKeys):
                span = subset.span
                keys = span.key_start, span.num_keys, span.causal_offset
                return visible_target(operands, lse, span.queries, *keys, self.scale)
            rows = subset.queries
            own = q_content[rows], q_rope[rows], *operands[2:]
            return self.chosen_target(own, lse[rows], subset.indices)

    def chosen_target(
        self, operands: tuple[Tensor, Tensor, Tensor, Tensor], lse: Tensor, chosen: Tensor
    ) -> Tensor:
        """As ``kernels.dsa.target.chosen_target``."""
        from absorbed_mla.kernels.dsa.kl_target import chosen_target

        return chosen_target(operands, lse, chosen, self.scale)

    def _lse(self, subset: VisibleKeys | ChosenKeys) -> Tensor:
        """Of the attention over the subset's keys, whose output nobody reads."""
        rows = subset.queries
        q_content, q_rope, k_content, k_rope, _ = self.inputs
        own = q_content[rows], q_rope[rows]
        if isinstance(subset, ChosenKeys):
            inputs = AttentionInputs(*own, k_content, k_rope, None)
            return self.sparse.forward(inputs, subset.indices, self.scale).lse
        keys = subset.span.keys
        inputs = AttentionInputs(*own, k_content[keys], k_rope[keys], None)
        span = subset.span
        own_span = Span(0, span.num_queries, 0, span.num_keys, span.causal_offset)
        return DENSE.forward(inputs, ScoreRules(self.scale, Spans([own_span]))).lse


def triton_scores(index: IndexVectors, subset: VisibleKeys | ChosenKeys, relu: bool) -> Tensor:
    """Index scores as of ``index_scores``, fp32; where a key is not seen, anything."""
    from absorbed_mla.kernels.dsa.index_chosen import chosen_scores

    with torch.cuda.device_of(index.query):
        if isinstance(subset, VisibleKeys):
            return triton_index_scores(index, subset, relu)
        rows = subset.queries
        query, weights = index.query[rows], index.weights[rows]
        return chosen_scores(query, index.key, weights, subset.indices, relu)


def triton_add_index_gradient(
    gradient: IndexVectors,
    score_grad: Tensor,
    index: IndexVectors,
    subset: VisibleKeys | ChosenKeys,
    relu: bool,
) -> None:
    """As ``add_index_gradient``.

    Of chosen keys, keys are added to in any order, or in a fixed one with
    ``torch.use_deterministic_algorithms(True)``.
    """
    from absorbed_mla.kernels.dsa.index_chosen import add_chosen_gradient
    from absorbed_mla.kernels.dsa.index_gradient import add_visible_gradient

    rows = subset.queries
    query, weights = index.query[rows], index.weights[rows]
    with torch.cuda.device_of(query):
        if isinstance(subset, VisibleKeys):
            keys = subset.span.keys
            parts = gradient.query[rows], gradient.key[keys], gradient.weights[rows]
            offset = subset.span.causal_offset
            key = index.key[keys]
            add_visible_gradient(parts, score_grad, query, key, weights, offset, relu)
        else:
            parts = gradient.query[rows], gradient.key, gradient.weights[rows]
            chosen = subset.indices
            fixed = torch.are_deterministic_algorithms_enabled()
            add_chosen_gradient(parts, score_grad, query, index.key, weights, chosen, relu, fixed)


TRITON_PIECES = LossPieces(TritonHeadSum, triton_scores, triton_add_index_gradient)
