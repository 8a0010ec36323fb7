"""Megatron's AdamW, and the learning rate of each of its steps."""

from __future__ import annotations

import argparse
import math

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import nn


class Optimizer:
    """Megatron's AdamW; a model in bf16 or fp16 is updated through fp32 copies of its parameters.

    Megatron clips by the gradient norm of the whole model, scales the loss of fp16, and describes
    the state to distributed checkpoints.

    Args:
        args: Learning rate, decay, betas, clipping, precision.
        model: Wrapped by Megatron's DDP, which gives every parameter its ``main_grad``.
    """

    def __init__(self, args: argparse.Namespace, model: nn.Module) -> None:
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
        self._config = OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=args.min_lr,
            weight_decay=args.weight_decay,
            adam_beta1=args.adam_beta1,
            adam_beta2=args.adam_beta2,
            adam_eps=args.adam_eps,
            clip_grad=args.clip_grad,
            bf16=args.bf16,
            fp16=args.fp16,
            params_dtype=dtype,
        )
        self._optimizer = get_megatron_optimizer(self._config, [model])

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the fp16 loss scale, 1 in other precisions."""
        return self._optimizer.scale_loss(loss)

    def step(self, lr: float) -> float | None:
        """Clip, and update the parameters.

        Args:
            lr: Learning rate.

        Returns:
            The gradient norm before clipping; None for a step that fp16 skips.

        Raises:
            FloatingPointError: If the gradient is not finite, which ends a run.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]
        updated, norm, _ = self._optimizer.step()
        # In fp32 this step made main_grad the gradient, to which the next backward would add.
        self._optimizer.zero_grad()
        if not updated:
            return None
        norm = float(norm)
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm is {norm}; lower --lr or set --clip-grad")
        return norm

    def weights_were_loaded(self) -> None:
        """Copy the model's weights again, after they were loaded from a checkpoint."""
        self._optimizer.reload_model_params()

    def sharded_state_dict(self, model_state: dict, is_loading: bool) -> dict:
        """State as a distributed checkpoint stores it.

        Args:
            model_state: The model's own.
            is_loading: Whether to make all state now, most of which the first step makes.
        """
        return self._optimizer.sharded_state_dict(model_state, is_loading=is_loading)

    def load_state_dict(self, state: dict) -> None:
        """Restore what :meth:`sharded_state_dict` described; options may be others by now."""
        config = self._config
        options = {
            "max_lr": config.lr,
            "min_lr": config.min_lr,
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_eps,
        }
        # Megatron numbers the parts of an optimizer that has experts of its own.
        for part in state.values() if 0 in state else (state,):
            for group in part.get("optimizer", part)["param_groups"]:
                group.update(options)
        self._optimizer.load_state_dict(state)


def learning_rate(
    iteration: int, *, lr: float, min_lr: float, warmup: int, decay_iters: int, style: str
) -> float:
    """The learning rate of an iteration: linear warm-up to ``lr``, then a decay to ``min_lr``.

    Not Megatron's OptimizerParamScheduler, which gives the first iteration a rate of 0 and refuses
    runs that are shorter than their warm-up.

    Args:
        iteration: Counted from 0.
        lr: Highest rate.
        min_lr: Rate at ``decay_iters`` and after.
        warmup: Iterations of warm-up.
        decay_iters: Iteration at which the decay has ended.
        style: One of the values of ``--lr-decay-style``.
    """
    if iteration < warmup:
        return lr * (iteration + 1) / warmup
    if style == "constant":
        return lr
    if iteration >= decay_iters:
        return min_lr
    done = (iteration - warmup) / max(1, decay_iters - warmup)
    remaining = 1 - done if style == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return min_lr + (lr - min_lr) * remaining
