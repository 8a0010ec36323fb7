"""What a run reports: lines, metrics and losses drawn, from the values that Megatron logs."""

from __future__ import annotations

import argparse
import inspect
import math
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossLoggingHelper,
)
from megatron.core.utils import unwrap_model
from torch import Tensor

from absorbed_mla.dsa.config import DSAConfig
from console.ranks import rank
from training.batch import LOSS
from training.megatron_loop import training
from training.metrics import MetricsFile

_PLACES = ("train_step", "training_log", "evaluate", "evaluate_and_print_results")
_HOST = {name: getattr(training, name) for name in _PLACES}
_LOG = inspect.signature(training.training_log)


class Report:
    """Takes the places of Megatron's ``train_step``, ``training_log`` and two of evaluation.

    Args:
        args: The command line.
        start: Number of iterations already done.
    """

    def __init__(self, args: argparse.Namespace, start: int) -> None:
        self._args, self._out = args, sys.stdout
        self.metrics = MetricsFile(args.metrics if rank() == 0 else None, start)
        self._evaluated = -1
        self._losses: dict[str, Tensor] = {}
        self.rank = rank()

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, file=self._out, flush=True)

    def count(self, tokens: Tensor) -> None:
        """Add tokens of this rank to those of the iteration, without waiting for the device."""
        self._tokens += tokens

    def places(self) -> dict[str, Callable]:
        """Functions by the names of Megatron's that they are called for."""
        return {name: getattr(self, name) for name in _PLACES}

    def train_step(self, forward_step, batches, model, optimizer, *more, **options):
        """Megatron's, timed, after a look at what it trains with."""
        self._began, self._config = time.perf_counter(), unwrap_model(model[0]).config
        self._tokens = torch.zeros((), device=torch.cuda.current_device())
        # Megatron logs that of the next step.
        self._rate = get_canonical_lr_for_logging(optimizer.param_groups)
        return _HOST["train_step"](forward_step, batches, model, optimizer, *more, **options)

    def training_log(self, *arguments, **options):
        """Write and print what Megatron has of an iteration, before it does so itself.

        Raises:
            FloatingPointError: If the gradient norm is not finite, but for overflows of fp16.
        """
        own = _LOG.bind(*arguments, **options).arguments
        args, iteration, seconds = self._args, own["iteration"], time.perf_counter() - self._began
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(self._tokens, group=group)
        loss, tokens = self._of_last_stage(own["loss_dict"]), int(self._tokens)
        norm = None if own["skipped_iter"] else own["grad_norm"]
        require_finite(norm)
        more = {}
        if self._config.dsa_indexer_loss_coeff and self._config.experimental_attention_variant:
            more["indexer_loss"] = self._indexer_loss(tokens)
        if args.qk_clip or args.log_max_attention_logit:
            largest = torch.tensor(own["max_attention_logit"], device=self._tokens.device)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            more["max_attention_logit"] = largest.item()
        record = {
            "train_loss": loss,
            "lr": self._rate,
            "grad_norm": norm,
            "tokens": tokens,
            "seconds": round(seconds, 4),
            **more,
        }
        self.metrics.write(iteration=iteration, **record)
        if iteration in (1, args.train_iters) or iteration % args.log_interval == 0:
            self.say(f"iteration {iteration:6d}/{args.train_iters} | {_line(record)}")
        return _HOST["training_log"](*arguments, **options)

    def evaluate(self, *arguments, **options):
        """Megatron's; keeps the loss."""
        found = _HOST["evaluate"](*arguments, **options)
        self._losses = found[0]
        return found

    def evaluate_and_print_results(self, prefix, step, batches, model, iteration, *more, **options):
        """Megatron's, once for each iteration."""
        if iteration == self._evaluated:
            return
        self._evaluated = iteration
        _HOST["evaluate_and_print_results"](
            prefix, step, batches, model, iteration, *more, **options
        )
        loss = self._of_last_stage(self._losses)
        self.metrics.write(iteration=iteration, valid_loss=loss)
        self.say(f"iteration {iteration:6d}/{self._args.train_iters} | validation loss {loss:.4f}")

    def _of_last_stage(self, losses: dict[str, Tensor]) -> float:
        """The loss, on all ranks; only those of the last pipeline stage have it."""
        device = torch.cuda.current_device()
        loss = torch.zeros((), dtype=torch.float64, device=device)
        if losses:
            loss.copy_(losses[LOSS])
        dist.broadcast(loss, dist.get_world_size() - 1)
        return loss.item()

    def _indexer_loss(self, tokens: int) -> float:
        """The coefficient times the KL divergence: the mean over tokens and layers with an indexer.

        Megatron's log has the sum over tokens, averages over data-parallel ranks, and divides by
        the number of all layers.
        """
        found: dict[str, float] = {}
        ranks = parallel_state.get_data_parallel_world_size()
        DSAIndexerLossLoggingHelper.track_indexer_metrics(
            ranks / max(tokens, 1), iteration=0, writer=None, total_loss_dict=found
        )
        dsa, layers = DSAConfig.from_config(self._config), self._config.num_layers
        learning = sum(not dsa.shares_selection(number + 1) for number in range(layers))
        return float(found["indexer loss"]) * layers / learning


def require_finite(norm: float | None) -> None:
    """Check the gradient norm of a step; None if it was skipped because fp16 overflowed.

    Raises:
        FloatingPointError: If it is not finite.
    """
    if norm is not None and not math.isfinite(norm):
        raise FloatingPointError(
            f"the gradient norm is {float(norm)}; lower --lr or set --clip-grad"
        )


def _line(record: dict) -> str:
    norm = record["grad_norm"]
    parts = [f"train loss {record['train_loss']:.4f}"]
    if "indexer_loss" in record:
        parts.append(f"indexer loss {record['indexer_loss']:.4f}")
    parts.append(f"lr {record['lr']:.2e}")
    parts.append(f"gradient norm {'skipped (fp16 overflow)' if norm is None else f'{norm:.3f}'}")
    if "max_attention_logit" in record:
        parts.append(f"largest score {record['max_attention_logit']:.2f}")
    return " | ".join([*parts, f"{record['tokens'] / record['seconds']:.0f} tokens/s"])
