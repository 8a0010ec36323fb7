"""The model as a policy: log-probabilities of sampled tokens, and the step that improves it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor, nn

from rollout.samples import SampleBatch
from training.optimizer import Optimizer


@dataclass(frozen=True)
class Update:
    """What came of one update, over all data-parallel ranks.

    Attributes:
        loss: Mean of -advantage * log-probability over the sampled tokens.
        grad_norm: Euclidean norm of the gradient.
        gap_max: Greatest difference between the log-probability of a sampled token in the rollout
            and in this forward.
        gap_mean: Mean of these differences.
        entropy: Mean of -log-probability over the sampled tokens.
        tokens: Sampled.
    """

    loss: float
    grad_norm: float
    gap_max: float
    gap_mean: float
    entropy: float
    tokens: int


def token_log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities fp32 [b, s] of ``targets`` from this rank's logits [b, s, vocabulary / tp].

    As Megatron's engine computes them, over the whole vocabulary, so that equal logits give equal
    bits. Differentiable.
    """
    whole = gather_from_tensor_model_parallel_region(logits).float()
    return whole.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


class Policy:
    """Updates a model by the advantages of what it sampled.

    Args:
        model: Wrapped by Megatron's DDP.
        optimizer: Its optimizer.
        device: Where the model is.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        model.config.finalize_model_grads_func = finalize_model_grads
        model.config.grad_scale_func = optimizer.scale_loss

    def update(self, batches: Sequence[SampleBatch], lr: float) -> Update:
        """One step of REINFORCE over all microbatches, of equal shapes."""
        self._model.train()
        self._model.zero_grad_buffer()
        rows, length = batches[0].tokens.shape
        reported = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter(batches),
            model=[self._model],
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=False,
        )
        norm = self._optimizer.step(lr)
        return self._summed(torch.stack(reported), 0.0 if norm is None else norm)

    def _summed(self, reported: Tensor, norm: float) -> Update:
        """Of every microbatch (sums of loss, gap, -log-probability; tokens; greatest gap)."""
        sums, largest = reported[:, :4].sum(0), reported[:, 4].max()
        group = parallel_state.get_data_parallel_group()
        dist.all_reduce(sums, group=group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        loss, gap, surprise, count = sums.tolist()
        return Update(
            loss=loss / count,
            grad_norm=norm,
            gap_max=largest.item(),
            gap_mean=gap / count,
            entropy=surprise / count,
            tokens=int(count),
        )


def _forward_step(batches: Iterator[SampleBatch], model: nn.Module):
    batch = next(batches)
    # The attention's mask type says causal; padding comes after what is looked at.
    logits = model(batch.tokens, batch.positions, None)
    return logits, functools.partial(_reinforce, batch)


def _reinforce(batch: SampleBatch, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(sum of losses, tokens, what is reported); Megatron divides by all ranks' tokens.

    One update per rollout: the policy is the one that sampled, and its ratio to itself is 1.
    """
    log_probs = token_log_probs(logits, batch.targets)
    log_probs = log_probs.masked_fill(~batch.sampled, 0.0)
    loss = -(batch.advantages * log_probs).sum()
    count = batch.sampled.sum()
    seen = log_probs.detach()
    gap = (seen - batch.log_probs).abs()
    sums = (loss.detach(), gap.sum(), -seen.sum(), count, gap.max())
    return loss, count.int(), torch.stack([x.double() for x in sums])
