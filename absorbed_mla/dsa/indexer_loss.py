"""The loss that an indexer learns from: how far its scores are from the attention's choice.

DeepSeek-V3.2 (arXiv:2512.02556), section 2.1: for every query, KL(p || softmax(I)), where p is the
sum over heads of the attention's probabilities, normalised and detached, and I are the indexer's
scores; over all visible keys while the indexer warms up, over the chosen keys afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from absorbed_mla.core_attention.types import AttentionInputs
from absorbed_mla.dsa.scores import add_index_gradient, index_scores
from absorbed_mla.dsa.sparse_reference import masked_scores, probabilities
from absorbed_mla.dsa.support import Support, head_groups, turns
from absorbed_mla.dsa.types import IndexVectors
from absorbed_mla.first_order import first_order_only


def indexer_loss(
    index: IndexVectors,
    inputs: AttentionInputs,
    lse: Tensor | None,
    supports: Iterable[Support],
    *,
    attention_scale: float,
    factor: float,
    relu: bool,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """``factor`` times the sum of KL(p || softmax(I)) over the queries of ``supports``.

    The gradient is computed along with the loss, chunk by chunk, and kept until backward, which
    multiplies it by the gradient of the loss: it takes the memory of ``index``, and nothing of the
    attention is kept or computed twice. Without gradients only the loss is computed.

    Args:
        index: The indexer's output; the only one that gets a gradient.
        inputs: Those of the attention in the absorbed form, this rank's heads.
        lse: [S_q, B, N] of the attention over the keys of ``supports``, fp32 (fp64). None where it
            was over others, as in a warm-up during sparse attention: it is computed again then.
        supports: ``visible_keys`` for the warm-up, ``chosen_keys`` for the sparse stage.
        attention_scale: Multiplies the scores of the attention.
        factor: The coefficient, over the number of queries if their mean is the loss.
        relu: Whether products of the indexer pass a ReLU.
        tp_group: Ranks over which the heads are split, all with the same ``index`` and
            ``supports``; None for one. They take turns with the chunks, so a rank has some terms of
            the gradient, times the number of ranks: Megatron averages gradients of the indexer.

    Returns:
        Scalar in the dtype of ``index.weights``, the same on all ranks of ``tp_group``.
    """
    if tp_group is not None and tp_group.size() == 1:
        tp_group = None
    target = _Target(inputs, lse, attention_scale, tp_group)
    if torch.is_grad_enabled() and any(x.requires_grad for x in index):
        return _IndexerLoss.apply(target, supports, factor, relu, *index)
    with torch.no_grad():
        return _compute(target, supports, factor, relu, index, gradient=None)


class _IndexerLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, target, supports, factor, relu, query, key, weights):
        index = IndexVectors(query, key, weights)
        # bf16 has the range of fp32, fp16 has not.
        kept = query.dtype if query.dtype is torch.bfloat16 else weights.dtype
        gradient = IndexVectors(
            torch.zeros_like(query, dtype=kept),
            torch.zeros_like(key, dtype=weights.dtype),
            torch.zeros_like(weights),
        )
        loss = _compute(target, supports, factor, relu, index, gradient)
        ctx.dtypes = [x.dtype for x in index]
        ctx.save_for_backward(*gradient)
        return loss

    @staticmethod
    @first_order_only
    def backward(ctx, grad):
        scaled = (kept * grad for kept in ctx.saved_tensors)
        return None, None, None, None, *(g.to(d) for g, d in zip(scaled, ctx.dtypes))


class _Target:
    """The distribution over keys that the indexer should have, of one chunk of queries."""

    def __init__(
        self,
        inputs: AttentionInputs,
        lse: Tensor | None,
        scale: float,
        tp_group: dist.ProcessGroup | None,
    ) -> None:
        q_content, q_rope, k_content, k_rope, value = (
            x if x is None else x.detach() for x in inputs
        )
        assert value is None and k_content.shape[2] == 1, "the absorbed form has one latent head"
        self.query = q_content, q_rope
        self.kv = torch.cat((k_content.squeeze(2), k_rope), dim=-1)
        self.lse = None if lse is None else lse.detach()
        self.scale = scale
        self.tp_group = tp_group

    def of(self, support: Support, owner: int, dtype: torch.dtype) -> Tensor:
        """Probabilities [B, Q, P]; a row sums to 1, or to 0 where a query has no key.

        Only the rank ``owner`` of the group has those of all heads.
        """
        rows = support.queries
        taken = support.take(self.kv).to(dtype)
        total: Tensor | None = None
        for heads in head_groups(self.query[0].shape[2], support.heads):
            query = torch.cat([x[rows, :, heads] for x in self.query], dim=-1).to(dtype)
            scores = masked_scores(query, taken, support, self.scale)
            if self.lse is None:
                lse = torch.logsumexp(scores, dim=-1)
            else:
                lse = self.lse[rows, :, heads].permute(1, 2, 0)
            part = probabilities(scores, lse).sum(1)
            total = part if total is None else total.add_(part)
        assert total is not None, "a rank has a head"
        if self.tp_group is not None:
            dist.reduce(total, group=self.tp_group, group_dst=owner)
        return total / total.sum(-1, keepdim=True).clamp(min=torch.finfo(dtype).tiny)


def _compute(
    target: _Target,
    supports: Iterable[Support],
    factor: float,
    relu: bool,
    index: IndexVectors,
    gradient: IndexVectors | None,
) -> Tensor:
    """The loss; its gradient is added to ``gradient``, if that is wanted."""
    dtype = index.weights.dtype
    group = target.tp_group
    size = 1 if group is None else group.size()
    total = index.weights.new_zeros(())
    for support, owner, own in turns(group, supports):
        wanted = target.of(support, owner, dtype)
        if not own:
            continue
        seen = support.seen.expand(wanted.shape)
        scores = index_scores(index, support, relu).masked_fill(~seen, -torch.inf)
        # A query without keys has no distribution: its row is 0 everywhere.
        scores = scores.masked_fill(~seen.any(-1, keepdim=True), 0.0)
        predicted = torch.log_softmax(scores, dim=-1)
        rows = torch.xlogy(wanted, wanted) - wanted * predicted.masked_fill(~seen, 0.0)
        total += rows.sum()
        if gradient is not None:
            score_grad = (predicted.exp() - wanted).masked_fill(~seen, 0.0) * (factor * size)
            add_index_gradient(gradient, score_grad, index, support, relu)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total * factor
