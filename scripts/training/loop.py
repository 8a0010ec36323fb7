"""The training loop."""

from __future__ import annotations

import argparse
import time

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from torch import nn

from training import distributed
from training.batch import BatchSource
from training.checkpoint import Checkpointer
from training.metrics import MetricsFile
from training.optimizer import Optimizer
from training.progress import Progress
from training.schedule import learning_rate
from training.step import global_batch_loss


class Trainer:
    """Trains from ``start`` to ``args.train_iters``.

    Args:
        args: The command line.
        model: Wrapped by Megatron's DDP.
        optimizer: Its optimizer.
        train: Training data.
        valid: Validation data, or None for no validation.
        checkpointer: Called for ``--save``.
        start: Iterations already done.
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
        self._saved_at = None
        first_rank = distributed.rank() == 0
        self.metrics = MetricsFile(args.metrics if first_rank else None, start)
        self._progress = Progress(
            start, args.train_iters, enabled=first_rank, bar=not args.no_progress
        )
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
            self._progress.close()
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
        # Megatron collects the balancing losses until they are reported.
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
        )
        if self._is_due(args.log_interval, also_last=True) or self._done == 1:
            shown_norm = "skipped (fp16 overflow)" if norm is None else f"{norm:.3f}"
            self._progress.log(
                f"iteration {self._done:6d}/{args.train_iters} | train loss {loss:.4f} | "
                f"lr {lr:.2e} | gradient norm {shown_norm} | {tokens / seconds:.0f} tokens/s"
            )
        self._progress.advance(loss=f"{loss:.3f}")

    def _validate(self) -> None:
        self._model.eval()
        total = count = 0.0
        with torch.no_grad():
            for batch in range(self._args.eval_iters):
                loss, tokens = global_batch_loss(self._model, self._valid, batch, backward=False)
                total, count = total + loss * tokens, count + tokens
        get_moe_metrics_tracker().clear()
        self.metrics.write(iteration=self._done, valid_loss=total / count)
        self._progress.log(
            f"iteration {self._done:6d}/{self._args.train_iters} | "
            f"validation loss {total / count:.4f}"
        )

    def _save(self) -> None:
        self._checkpointer.save(self._done)
        self._saved_at = self._done
        self._progress.log(f"saved iteration {self._done} in {self._args.save}")

    def _is_due(self, interval: int, also_last: bool = False) -> bool:
        return self._done % interval == 0 or (also_last and self._done == self._args.train_iters)
