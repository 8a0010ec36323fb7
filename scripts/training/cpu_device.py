"""Megatron's schedules on a machine without a GPU."""

from __future__ import annotations

import functools

import torch

from absorbed_mla.testing.cpu_host import enable_cpu_host


def prepare_device(local_rank: int) -> torch.device:
    """The device of this process; without a GPU, Megatron is taught to run on the CPU."""
    if not enable_cpu_host():
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    for name in ("zeros", "ones"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    return torch.device("cpu")


def _on_cpu(function):
    """Megatron's schedules count tokens in ``torch.zeros([], device="cuda")``."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return call
