"""The indexer's loss: KL divergence of its scores from the attention's probabilities.

DeepSeek-V3.2 (arXiv:2512.02556), section 2.1: for every query, KL(p || softmax(I)), where p is the
sum over heads of the attention's probabilities, normalised and detached, and I are the indexer's
scores; over all visible keys while the indexer warms up, over the chosen keys afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from absorbed_mla.core_attention.types import AttentionInputs
from absorbed_mla.dsa.index_vectors import IndexVectors
from absorbed_mla.dsa.key_subset import KeySubset, head_groups, turns
from absorbed_mla.dsa.scores import add_index_gradient, index_scores
from absorbed_mla.dsa.sparse_reference import masked_scores, probabilities
from absorbed_mla.once_differentiable import once_differentiable


class HeadSum:
    """The attention's probabilities of a chunk of queries, summed over heads, in plain PyTorch.

    Args:
        inputs: In the absorbed form, this rank's heads.
        lse: [S_q, B, N] over the keys of the subsets; None to compute it again.
        scale: Multiplies the scores.
        dtype: To compute in.
    """

    def __init__(
        self, inputs: AttentionInputs, lse: Tensor | None, scale: float, dtype: torch.dtype
    ) -> None:
        q_content, q_rope, k_content, k_rope, _ = inputs
        self.query = q_content, q_rope
        self.kv = torch.cat((k_content.squeeze(2), k_rope), dim=-1)
        self.lse, self.scale, self.dtype = lse, scale, dtype

    def __call__(self, subset: KeySubset) -> Tensor:
        """[B, Q, P]; 0 where a query has no key."""
        rows = subset.queries
        taken = subset.take(self.kv).to(self.dtype)
        total: Tensor | None = None
        for heads in head_groups(self.query[0].shape[2], subset.heads):
            query = torch.cat([x[rows, :, heads] for x in self.query], dim=-1).to(self.dtype)
            scores = masked_scores(query, taken, subset, self.scale)
            if self.lse is None:
                lse = torch.logsumexp(scores, dim=-1)
            else:
                lse = self.lse[rows, :, heads].permute(1, 2, 0)
            part = probabilities(scores, lse).sum(1)
            total = part if total is None else total.add_(part)
        assert total is not None, "a rank has a head"
        return total


class LossPieces(NamedTuple):
    """What the loss computes with, a chunk of queries at a time.

    Attributes:
        head_sum: Makes what computes the target from a subset, as :class:`HeadSum`.
        scores: As ``scores.index_scores``; where a key is not seen, anything.
        add_gradient: As ``scores.add_index_gradient``.
    """

    head_sum: Callable[
        [AttentionInputs, Tensor | None, float, torch.dtype], Callable[[KeySubset], Tensor]
    ]
    scores: Callable[[IndexVectors, KeySubset, bool], Tensor]
    add_gradient: Callable[[IndexVectors, Tensor, IndexVectors, KeySubset, bool], None]


REFERENCE_PIECES = LossPieces(HeadSum, index_scores, add_index_gradient)


def indexer_loss(
    index: IndexVectors,
    inputs: AttentionInputs,
    lse: Tensor | None,
    subsets: Iterable[KeySubset],
    *,
    attention_scale: float,
    factor: float,
    relu: bool,
    tp_group: dist.ProcessGroup | None = None,
    pieces: LossPieces = REFERENCE_PIECES,
    counts: Tensor | None = None,
) -> Tensor:
    """``factor`` times the sum of KL(p || softmax(I)) over the queries of ``subsets``.

    The gradient is computed along with the loss, chunk by chunk, and kept until backward, which
    multiplies it by the gradient of the loss: it takes the memory of ``index``, and nothing of the
    attention is kept or computed twice. Without gradients only the loss is computed.

    Args:
        index: The indexer's output; the only one that gets a gradient.
        inputs: Those of the attention in the absorbed form, this rank's heads.
        lse: [S_q, B, N] of the attention over the keys of ``subsets``, fp32 (fp64). None where it
            was over others, as in a warm-up during sparse attention: it is computed again then.
        subsets: ``visible_keys`` for the warm-up, ``chosen_keys`` for the sparse stage.
        attention_scale: Multiplies the scores of the attention.
        factor: The coefficient, over the number of queries if their mean is the loss.
        relu: Whether products of the indexer pass a ReLU.
        tp_group: Ranks over which the heads are split, all with the same ``index`` and
            ``subsets``; None for one. They take turns with the chunks, so a rank has some terms of
            the gradient, times the number of ranks: Megatron averages gradients of the indexer.
        pieces: What it is computed with.
        counts: How often each query is in the sum, [S_q]; None for once.

    Returns:
        Scalar in the dtype of ``index.weights``, the same on all ranks of ``tp_group``.
    """
    if tp_group is not None and tp_group.size() == 1:
        tp_group = None
    assert inputs.value is None and inputs.k_content.shape[2] == 1, "one latent for all heads"
    inputs = AttentionInputs(*(x if x is None else x.detach() for x in inputs))
    lse = None if lse is None else lse.detach()
    head_sum = pieces.head_sum(inputs, lse, attention_scale, index.weights.dtype)
    loss = _Loss(pieces, head_sum, factor, relu, tp_group, counts)
    if torch.is_grad_enabled() and any(x.requires_grad for x in index):
        return _IndexerLoss.apply(loss, subsets, *index)
    with torch.no_grad():
        return loss.compute(subsets, index, gradient=None)


class _IndexerLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, subsets, query, key, weights):
        index = IndexVectors(query, key, weights)
        # bf16 has the range of fp32, fp16 has not.
        kept = query.dtype if query.dtype is torch.bfloat16 else weights.dtype
        gradient = IndexVectors(
            torch.zeros_like(query, dtype=kept),
            torch.zeros_like(key, dtype=weights.dtype),
            torch.zeros_like(weights),
        )
        found = loss.compute(subsets, index, gradient)
        ctx.dtypes = [x.dtype for x in index]
        ctx.save_for_backward(*gradient)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        scaled = (kept * grad for kept in ctx.saved_tensors)
        return None, None, *(g.to(d) for g, d in zip(scaled, ctx.dtypes))


class _Loss(NamedTuple):
    """The loss of given pieces; ``tp_group`` has more than one rank, or is None."""

    pieces: LossPieces
    head_sum: Callable[[KeySubset], Tensor]
    factor: float
    relu: bool
    tp_group: dist.ProcessGroup | None
    counts: Tensor | None

    def target(self, subset: KeySubset, owner: int) -> Tensor:
        """The distribution over keys that the indexer should have, [B, Q, P].

        A row sums to 1, or to 0 where a query has no key. Only the rank ``owner`` of the group has
        that of all heads.
        """
        total = self.head_sum(subset)
        if self.tp_group is not None:
            dist.reduce(total, group=self.tp_group, group_dst=owner)
        return total / total.sum(-1, keepdim=True).clamp(min=torch.finfo(total.dtype).tiny)

    def compute(
        self, subsets: Iterable[KeySubset], index: IndexVectors, gradient: IndexVectors | None
    ) -> Tensor:
        """The loss; its gradient is added to ``gradient``, if that is wanted."""
        size = 1 if self.tp_group is None else self.tp_group.size()
        total = index.weights.new_zeros(())
        for subset, owner, own in turns(self.tp_group, subsets):
            wanted = self.target(subset, owner)
            if not own:
                continue
            seen = subset.seen.expand(wanted.shape)
            scores = self.pieces.scores(index, subset, self.relu).masked_fill(~seen, -torch.inf)
            # A query without keys has no distribution: its row is 0 everywhere.
            scores = scores.masked_fill(~seen.any(-1, keepdim=True), 0.0)
            predicted = torch.log_softmax(scores, dim=-1)
            rows = torch.xlogy(wanted, wanted) - wanted * predicted.masked_fill(~seen, 0.0)
            count = None if self.counts is None else self.counts[subset.queries, None]
            total += (rows if count is None else rows * count).sum()
            if gradient is not None:
                score_grad = (predicted.exp() - wanted).masked_fill(~seen, 0.0)
                score_grad *= self.factor * size  # Megatron averages over ranks
                if count is not None:
                    score_grad *= count
                self.pieces.add_gradient(gradient, score_grad, index, subset, self.relu)
        if self.tp_group is not None:
            dist.all_reduce(total, group=self.tp_group)
        return total * self.factor
