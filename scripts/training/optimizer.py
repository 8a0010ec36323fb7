"""Megatron's AdamW, and the learning rate of each iteration."""

from __future__ import annotations

import argparse
import math

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import nn

from training.model import params_dtype


class Optimizer:
    """Megatron's AdamW; a model in bf16 or fp16 is updated through fp32 copies of its parameters.

    Megatron clips by the gradient norm of the whole model, scales the loss of fp16, and describes
    the state to distributed checkpoints.

    Args:
        args: The command line: learning rate, weight decay, betas, epsilon, clipping, precision.
        model: Wrapped by Megatron's DDP, which gives every parameter its ``main_grad``.
    """

    def __init__(self, args: argparse.Namespace, model: nn.Module) -> None:
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
            params_dtype=params_dtype(args),
        )
        self._optimizer = get_megatron_optimizer(self._config, [model])

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the loss scale, which is 1 without fp16."""
        return self._optimizer.scale_loss(loss)

    def step(self, lr: float) -> float | None:
        """Clip the gradients and update the parameters.

        Returns:
            The gradient norm before clipping; None if the step was skipped because fp16 overflowed.

        Raises:
            FloatingPointError: If the gradient norm is not finite otherwise.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]
        updated, norm, _ = self._optimizer.step()
        # In fp32 the step sets param.grad to main_grad, and the next backward would add to it.
        self._optimizer.zero_grad()
        if not updated:
            return None
        norm = float(norm)
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm is {norm}; lower --lr or set --clip-grad")
        return norm

    def weights_were_loaded(self) -> None:
        """Update the fp32 copies after weights were loaded into the model."""
        self._optimizer.reload_model_params()

    def sharded_state_dict(self, model_state: dict, is_loading: bool) -> dict:
        """The optimizer's state for a distributed checkpoint.

        Args:
            model_state: The sharded state dict of the model.
            is_loading: Whether the state will be loaded, and so must exist before the first step.
        """
        return self._optimizer.sharded_state_dict(model_state, is_loading=is_loading)

    def load_state_dict(self, state: dict) -> None:
        """Load a state; the learning rates, betas and epsilon stay those of this run."""
        config = self._config
        options = {
            "max_lr": config.lr,
            "min_lr": config.min_lr,
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_eps,
        }
        # With experts Megatron has several optimizers, numbered in the state.
        for part in state.values() if 0 in state else (state,):
            for group in part.get("optimizer", part)["param_groups"]:
                group.update(options)
        self._optimizer.load_state_dict(state)


def learning_rate(
    iteration: int, *, lr: float, min_lr: float, warmup: int, decay_iters: int, style: str
) -> float:
    """The learning rate of an iteration: linear warm-up to ``lr``, then decay to ``min_lr``.

    Megatron's OptimizerParamScheduler is not used: it gives the first iteration a rate of 0, and
    refuses runs that are shorter than their warm-up.

    Args:
        iteration: Number of the iteration, from 0.
        lr: Maximum rate.
        min_lr: Rate from ``decay_iters`` on.
        warmup: Number of iterations of warm-up.
        decay_iters: Iteration that ends the decay.
        style: Value of ``--lr-decay-style``.
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
