"""AdamW on Megatron's main gradients: Megatron's own on a GPU, torch's on a CPU."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Protocol

import torch
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import nn

from training.gradients import gradient_norm


class Optimizer(Protocol):
    """What the training loop and the checkpoints need."""

    def step(self, lr: float) -> float | None:
        """Update the parameters; returns the gradient norm, None for a step skipped by fp16."""

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to differentiate."""

    def sharded_state_dict(self, model_state: dict, is_loading: bool) -> dict:
        """State as a distributed checkpoint stores it."""

    def load_state_dict(self, state: dict) -> None:
        """Restore what :meth:`sharded_state_dict` described."""


def build_optimizer(args: argparse.Namespace, model: nn.Module) -> Optimizer:
    """The optimizer for the device that ``model`` is on."""
    if next(model.parameters()).is_cuda:
        return MegatronAdamW(args, model)
    return MainGradAdamW(args, model)


def _decays(name: str, param: nn.Parameter) -> bool:
    """As in Megatron, norms and biases are not decayed."""
    return param.ndim > 1 and not name.endswith(".bias")


class MainGradAdamW:
    """torch's AdamW on fp32 copies of the parameters (on themselves if they are fp32).

    Megatron's optimizers refuse CPU tensors by type.

    Args:
        args: Learning rate, decay, betas, clipping.
        model: Wrapped by Megatron's DDP, which gives every parameter its ``main_grad``.
    """

    _STATES = ("exp_avg", "exp_avg_sq")

    def __init__(self, args: argparse.Namespace, model: nn.Module) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._params = [p for _, p in named]
        self._masters = [
            p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for p in self._params
        ]
        self._clip_grad = args.clip_grad
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for (name, param), master in zip(named, self._masters):
            groups[_decays(name, param)].append(master)
        self._adam = torch.optim.AdamW(
            [
                {"params": groups[True], "weight_decay": args.weight_decay},
                {"params": groups[False], "weight_decay": 0.0},
            ],
            lr=args.lr,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_eps,
        )

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` itself: bf16 and fp32 need no scaling."""
        return loss

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Clip by the norm over all ranks, update, and write back the model's precision.

        Raises:
            FloatingPointError: If the gradient is not finite; the parameters are as before.
        """
        norm = gradient_norm(self._params)
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm is {norm}; lower --lr or set --clip-grad")
        scale = 1.0
        if self._clip_grad and norm > self._clip_grad:
            scale = self._clip_grad / norm
        for param, master in zip(self._params, self._masters):
            master.grad = param.main_grad.float()
            if scale != 1.0:
                master.grad.mul_(scale)
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        for param, master in zip(self._params, self._masters):
            master.grad = None
            if param is not master:
                param.copy_(master)
        return norm

    def sharded_state_dict(self, model_state: dict, is_loading: bool) -> dict:
        """Moments and fp32 copies, cut like the parameters, so they fit any parallel size."""
        by_param = get_param_id_to_sharded_param_map(model_state, iter(self._params))
        state: dict = {"step": self._step_count()}
        for index, name, tensor in self._tensors():
            state.setdefault(name, {})[index] = make_sharded_optimizer_tensor(
                by_param[index], tensor, prefix=f"optimizer.state.{name}"
            )
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Restore moments, fp32 copies and the number of steps."""
        for index, name, tensor in self._tensors():
            tensor.copy_(state[name][index])
        for master in self._masters:
            self._adam.state[master]["step"].fill_(state["step"])

    def _step_count(self) -> int:
        state = self._adam.state.get(self._masters[0])
        return int(state["step"]) if state else 0

    def _tensors(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """(parameter, name, tensor) of all state; makes Adam's, which come with the first step."""
        for index, (param, master) in enumerate(zip(self._params, self._masters)):
            state = self._adam.state[master]
            if not state:
                state["step"] = torch.tensor(0.0)
                for name in self._STATES:
                    state[name] = torch.zeros_like(master)
            for name in self._STATES:
                yield index, name, state[name]
            if param is not master:
                yield index, "fp32_param", master.detach()


class MegatronAdamW:
    """Megatron's optimizer, with the learning rate given at every step.

    Args:
        args: Learning rate, decay, betas, clipping, precision.
        model: Wrapped by Megatron's DDP.
    """

    def __init__(self, args: argparse.Namespace, model: nn.Module) -> None:
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
        config = OptimizerConfig(
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
        self._optimizer = get_megatron_optimizer(config, [model])
        self._weight_decay = args.weight_decay

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the fp16 loss scale, 1 in other precisions."""
        return self._optimizer.scale_loss(loss)

    def step(self, lr: float) -> float | None:
        """Update the parameters; returns the gradient norm, None for a step skipped by fp16."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._weight_decay * group.get("wd_mult", 1.0)
        updated, norm, _ = self._optimizer.step()
        return float(norm) if updated else None

    def sharded_state_dict(self, model_state: dict, is_loading: bool) -> dict:
        """Megatron's optimizer state."""
        return self._optimizer.sharded_state_dict(model_state, is_loading=is_loading)

    def load_state_dict(self, state: dict) -> None:
        """Restore Megatron's optimizer state."""
        self._optimizer.load_state_dict(state)
