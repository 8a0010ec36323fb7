"""The policy: the model, log-probabilities of its samples, and the REINFORCE update."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor, nn

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.batch_invariant import enable_batch_invariant_mode
from absorbed_mla.shared_prefix_log_probs import shared_prefix_log_probs
from rollout.replay import replayed
from rollout.samples import Batch, SharedPrefixBatch
from training import megatron_loop
from training.checkpoint import find_checkpoint
from training.model import training_config
from training.report import require_finite


def build_policy(args: argparse.Namespace, device: torch.device) -> tuple:
    """Build this rank's part of the model, with random weights or those of ``--load``; collective.

    ``--batch-invariant`` switches parity mode on for the process.

    Returns:
        Megatron's model, wrapped, its optimizer and scheduler.

    Raises:
        ValueError: If Megatron refuses the options, or the checkpoint does not hold this model.
    """
    if args.batch_invariant:
        enable_batch_invariant_mode(device.type, args.tensor_parallel_parts)
    options = AbsorbedMLAOptions(
        form=args.form,
        down_projection=args.down_projection,
        batch_invariant=args.batch_invariant,
    )
    weights = str(find_checkpoint(args.load)) if args.load else None
    of_run = argparse.Namespace(**{**vars(args), "load": None})
    config = training_config(of_run, weights, options, cache_mla_latents=True)
    model, optimizer, scheduler = megatron_loop.set_up(of_run, config)
    model.config.no_sync_func = model.no_sync
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.grad_scale_func = optimizer.scale_loss
    return model, optimizer, scheduler


def token_log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities of ``targets``, fp32 [b, s], differentiable.

    Computed over the gathered vocabulary, as Megatron's engine does, so that equal logits give
    bitwise equal results.

    Args:
        logits: Of this rank, [b, s, vocabulary / tp].
        targets: int64 [b, s].
    """
    whole = gather_from_tensor_model_parallel_region(logits).float()
    return whole.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def update(model: nn.Module, optimizer, scheduler, batches: Sequence[Batch]) -> dict:
    """Take one REINFORCE step over all microbatches, which have equally many samples.

    Args:
        model: Of :func:`build_policy`, like its optimizer and scheduler.
        optimizer: Of the model.
        scheduler: Of its learning rate.
        batches: The microbatches of this rank.

    Returns:
        Metrics over all data-parallel ranks: ``loss``, the mean of -advantage x log-probability
        over the sampled tokens; ``entropy``, that of -log-probability in nats; ``log_prob_gap_max``
        and ``_mean``, by which the log-probability of a sampled token differs between rollout and
        training; the Euclidean ``grad_norm``; and the number of sampled ``tokens``.

    Raises:
        FloatingPointError: If the gradient norm is not finite.
    """
    model.train()
    model.zero_grad_buffer()
    rows, length = len(batches[0].samples), batches[0].tokens.shape[-1]
    # Before the update: Megatron's warm-up begins with a rate of 0.
    ranks = parallel_state.get_data_parallel_world_size()
    scheduler.step(increment=len(batches) * rows * ranks)
    with replayed(model, batches):
        reported = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=False,
        )
    updated, norm, _ = optimizer.step()
    # In fp32 the step sets param.grad to main_grad, and the next backward would add to it.
    optimizer.zero_grad()
    require_finite(norm)
    # Over microbatches and ranks.
    found = torch.stack(reported)
    sums, largest = found[:, :4].sum(0), found[:, 4].max()
    group = parallel_state.get_data_parallel_group()
    dist.all_reduce(sums, group=group)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    loss, gap, surprise, count = sums.tolist()
    return {
        "log_prob_gap_max": largest.item(),
        "log_prob_gap_mean": gap / count,
        "loss": loss / count,
        "entropy": surprise / count,
        "grad_norm": float(norm) if updated else 0.0,
        "tokens": int(count),
    }


def _forward_step(batches: Iterator[Batch], model: nn.Module):
    batch = next(batches)
    if isinstance(batch, SharedPrefixBatch):
        log_probs = shared_prefix_log_probs(model, batch.tree, batch.tokens, batch.targets)
        return log_probs, functools.partial(_reinforce, batch)
    # No mask: the attention is causal, and padding comes after every sampled token.
    logits = model(batch.tokens, batch.positions, None)
    return logits, lambda logits: _reinforce(batch, token_log_probs(logits, batch.targets))


def _reinforce(batch: Batch, log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of losses, number of sampled tokens, and what is reported of a microbatch.

    Megatron divides the gradient by the tokens of all ranks. With one update per rollout the
    policy is the one that sampled, so the ratio of GRPO's objective is 1. Reported are the sums of
    loss, gap and -log-probability, the number of tokens, and the maximum gap.
    """
    log_probs = log_probs.masked_fill(~batch.sampled, 0.0)
    loss = -(batch.advantages * log_probs).sum()
    count = batch.sampled.sum()
    seen = log_probs.detach()
    gap = (seen - batch.log_probs).abs()
    sums = (loss.detach(), gap.sum(), -seen.sum(), count, gap.max())
    return loss, count.int(), torch.stack([x.double() for x in sums])
