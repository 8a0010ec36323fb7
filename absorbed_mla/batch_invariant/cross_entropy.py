"""Cross entropy over a vocabulary that tensor-parallel ranks share, the same bits at every size."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from absorbed_mla.batch_invariant import collectives, parts
from absorbed_mla.batch_invariant.tree import tree_sum
from absorbed_mla.once_differentiable import once_differentiable


class VocabParallelCrossEntropy(torch.autograd.Function):
    """In place of Megatron's function of the same name."""

    @staticmethod
    def forward(
        ctx,
        logits: Tensor,
        target: Tensor,
        label_smoothing: float = 0.0,
        tp_group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """The loss of every token, in fp32.

        Args:
            logits: [S, B, this rank's vocabulary].
            target: Token ids [S, B].
            label_smoothing: 0.
            tp_group: The ranks that share the vocabulary; None: the tensor-parallel ones.

        Raises:
            ValueError: With label smoothing.
        """
        if label_smoothing:
            raise ValueError(f"{parts.OPTION} needs label_smoothing=0, got {label_smoothing}")
        group, width = tp_group or parts.tensor_parallel_group(), logits.shape[-1]
        largest = logits.float().amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        own = target - group.rank() * width
        ctx.there = (own >= 0) & (own < width)
        ctx.place = own.clamp(0, width - 1).unsqueeze(-1)
        slices = parts.split(logits, parts.own(group), -1)
        # By parts, since vector loops of a CPU have another formula for the last elements.
        shifted = [part.float() - largest for part in slices]
        exps = [part.exp() for part in shifted]
        total = tree_sum([part.sum(-1) for part in exps])
        chosen = torch.cat(shifted, -1).gather(-1, ctx.place).squeeze(-1)
        # One rank has the target; zeros of the others change nothing.
        total, chosen = (collectives.reduce_by_tree(x, group) for x in (total, chosen * ctx.there))
        ctx.save_for_backward(torch.cat(exps, -1).div_(total.unsqueeze(-1)))
        return total.log() - chosen

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        """(softmax - one hot) times the gradient of the loss."""
        (softmax,) = ctx.saved_tensors
        minus_one = -ctx.there.to(softmax.dtype).unsqueeze(-1)
        found = softmax.scatter_add(-1, ctx.place, minus_one)
        return found.mul_(grad.unsqueeze(-1)), None, None, None
