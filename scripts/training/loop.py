"""The training loop: iterations through Megatron's schedules, validation, saving, log lines.

Megatron's own loop is in megatron.training, which needs Python 3.12 and its own command line.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from absorbed_mla.qk_clip import clip_qk
from training import distributed
from training.batch import Batch, BatchSource
from training.checkpoint import Checkpointer
from training.metrics import MetricsFile
from training.optimizer import Optimizer, learning_rate
from training.sparse_stage import mean_indexer_loss


class Trainer:
    """Trains a model from iteration ``start`` to ``args.train_iters``.

    Args:
        args: The command line.
        model: Wrapped by Megatron's DDP.
        optimizer: Its optimizer.
        train: Training data.
        valid: Validation data, or None for no validation.
        checkpointer: Saves to ``--save``.
        start: Number of iterations already done.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        model: nn.Module,
        optimizer: Optimizer,
        train: BatchSource,
        valid: BatchSource | None,
        checkpointer: Checkpointer,
        start: int,
    ) -> None:
        self._args = args
        self._model = model
        self._optimizer = optimizer
        self._train = train
        self._valid = valid
        self._checkpointer = checkpointer
        self._done = start
        self._saved_at: int | None = None
        self.metrics = MetricsFile(args.metrics if distributed.rank() == 0 else None, start)
        config = model.config
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss

    def run(self) -> None:
        """Train, validate, save and report until the end or ``--exit-interval``."""
        args = self._args
        try:
            while self._done < args.train_iters:
                self._iteration()
                if self._valid and self._is_due(args.eval_interval, also_last=True):
                    self._validate()
                if args.save and args.save_interval and self._is_due(args.save_interval):
                    self._save()
                if args.exit_interval and self._is_due(args.exit_interval):
                    break
            if args.save and self._saved_at != self._done:
                self._save()
        finally:
            self.metrics.close()

    def _iteration(self) -> None:
        args = self._args
        started = time.perf_counter()
        self._model.train()
        self._model.zero_grad_buffer()
        lr = learning_rate(
            self._done,
            lr=args.lr,
            min_lr=args.min_lr,
            warmup=args.lr_warmup_iters,
            decay_iters=args.lr_decay_iters,
            style=args.lr_decay_style,
        )
        loss, tokens = global_batch_loss(self._model, self._train, self._done, backward=True)
        norm = self._optimizer.step(lr)
        largest_score = self._clip_qk()
        indexer_loss = mean_indexer_loss(self._model.config, tokens)
        # Megatron collects balancing losses until they are reported, which they are not here.
        get_moe_metrics_tracker().clear()
        self._done += 1
        seconds = time.perf_counter() - started
        self.metrics.write(
            iteration=self._done,
            train_loss=loss,
            lr=lr,
            grad_norm=norm,
            tokens=tokens,
            seconds=round(seconds, 4),
            **({} if indexer_loss is None else {"indexer_loss": indexer_loss}),
            **({} if largest_score is None else {"max_attention_logit": largest_score}),
        )
        if self._is_due(args.log_interval, also_last=True) or self._done == 1:
            shown_norm = "skipped (fp16 overflow)" if norm is None else f"{norm:.3f}"
            shown_indexer = "" if indexer_loss is None else f" | indexer loss {indexer_loss:.4f}"
            shown_score = "" if largest_score is None else f" | largest score {largest_score:.2f}"
            _log(
                f"iteration {self._done:6d}/{args.train_iters} | "
                f"train loss {loss:.4f}{shown_indexer} | "
                f"lr {lr:.2e} | gradient norm {shown_norm}{shown_score} | "
                f"{tokens / seconds:.0f} tokens/s"
            )

    def _clip_qk(self) -> float | None:
        """QK-clip if asked for; the largest score of the whole model, or None if not recorded."""
        args = self._args
        if not (args.qk_clip or args.log_max_attention_logit):
            return None
        largest = torch.tensor(clip_qk(self._model, log_max_only=not args.qk_clip))
        largest = largest.to(next(self._model.parameters()).device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)

    def _validate(self) -> None:
        self._model.eval()
        total = count = 0.0
        with torch.no_grad():
            for batch in range(self._args.eval_iters):
                loss, tokens = global_batch_loss(self._model, self._valid, batch, backward=False)
                total, count = total + loss * tokens, count + tokens
        get_moe_metrics_tracker().clear()
        self.metrics.write(iteration=self._done, valid_loss=total / count)
        _log(
            f"iteration {self._done:6d}/{self._args.train_iters} | "
            f"validation loss {total / count:.4f}"
        )

    def _save(self) -> None:
        self._checkpointer.save(self._done)
        self._saved_at = self._done
        _log(f"saved iteration {self._done} in {self._args.save}")

    def _is_due(self, interval: int, also_last: bool = False) -> bool:
        return self._done % interval == 0 or (also_last and self._done == self._args.train_iters)


def _log(text: str) -> None:
    if distributed.rank() == 0:
        print(text, flush=True)


def global_batch_loss(
    model: nn.Module, source: BatchSource, iteration: int, *, backward: bool
) -> tuple[float, int]:
    """Run all microbatches of an iteration through Megatron's pipeline schedule.

    Args:
        model: Wrapped by Megatron's DDP.
        source: Its microbatches.
        iteration: Number of the iteration, from 0.
        backward: Whether to add the gradient of the loss to every parameter's ``main_grad``.

    Returns:
        The mean loss over the tokens of the global batch, and the number of these tokens; the same
        on every rank.
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
        None,  # no mask: the layers are causal
        labels=batch.labels,
        packed_seq_params=batch.packed_seq_params,
        padding_mask=_stage_padding(batch.padding_mask, model.config),
    )
    return output, functools.partial(_summed_loss, batch.loss_mask)


def _stage_padding(padding_mask: Tensor | None, config: TransformerConfig) -> Tensor | None:
    """The padding mask, bool [b, s], as this pipeline stage expects it.

    Under sequence parallelism Megatron's first stage splits it together with the embedding; later
    stages expect only this rank's tokens.
    """
    if padding_mask is None or not config.sequence_parallel:
        return padding_mask
    if parallel_state.is_pipeline_first_stage():
        return padding_mask
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    return padding_mask.chunk(tp, dim=1)[rank].contiguous()


def _summed_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the losses [b, s] of all tokens that are not masked.

    Returns:
        What Megatron expects under ``calculate_per_token_loss``: the sum, which it divides by the
        number of tokens of all ranks; the number of tokens of this rank; and what the schedule
        collects from each microbatch, float64 (sum, tokens).
    """
    loss_sum = (losses.float() * loss_mask).sum()
    count = loss_mask.sum()
    return loss_sum, count.int(), torch.stack([loss_sum.detach(), count]).double()
