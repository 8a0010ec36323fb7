"""One iteration: forward and backward over the microbatches, through Megatron's schedules."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from training.batch import Batch, BatchSource


def global_batch_loss(
    model: nn.Module, source: BatchSource, iteration: int, *, backward: bool
) -> tuple[float, int]:
    """Run all microbatches of ``iteration``.

    With ``backward``, every parameter's ``main_grad`` is the gradient of the returned loss (of what
    was in it before, plus that).

    Returns:
        The mean loss over the tokens of the global batch, and their number, on every rank.
    """
    with torch.set_grad_enabled(backward):
        reported = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=source.iteration(iteration),
            model=[model],
            num_microbatches=source.num_microbatches,
            seq_length=source.windows.seq_length,
            micro_batch_size=source.micro_batch_size,
            forward_only=not backward,
        )
    total = torch.zeros(2, dtype=torch.float64, device=source.device)
    for loss_and_count in reported:
        total += loss_and_count
    # Only the last pipeline stage has losses; the others add zeros.
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
    loss_sum, count = total.tolist()
    return loss_sum / max(count, 1.0), int(count)


def _forward_step(batches: Iterator[Batch], model: nn.Module):
    batch = next(batches)
    output = model(
        batch.tokens,
        batch.position_ids,
        None,  # the attention's mask type says causal
        labels=batch.labels,
        packed_seq_params=batch.packed_seq_params,
        padding_mask=_stage_padding(batch.padding_mask, model.config),
    )
    return output, functools.partial(_summed_loss, batch.loss_mask)


def _stage_padding(padding_mask: Tensor | None, config: TransformerConfig) -> Tensor | None:
    """Bool [b, s] as this pipeline stage takes it: the first cuts it for sequence parallelism."""
    if padding_mask is None or not config.sequence_parallel:
        return padding_mask
    if parallel_state.is_pipeline_first_stage():
        return padding_mask
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    return padding_mask.chunk(tp, dim=1)[rank].contiguous()


def _summed_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [b, s] to (sum, tokens, what is reported); Megatron divides by all ranks' tokens."""
    loss_sum = (losses.float() * loss_mask).sum()
    count = loss_mask.sum()
    return loss_sum, count.int(), torch.stack([loss_sum.detach(), count]).double()
