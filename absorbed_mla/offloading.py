"""Megatron's fine-grained activation offloading, around the stages of this attention.

``offload_modules`` names the stages whose saved activations wait for backward in host memory:
``qkv_linear`` (all projections up to kv and query), ``core_attn`` and ``attn_proj``. Megatron marks
the beginning and the end of a stage in the graph, copies what autograd saves in between to the host
after it, and back when backward comes near.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_Result = TypeVar("_Result")


class StageOffloading:
    """Runs stages, and sends what they save for backward to the host where the config asks for it.

    Args:
        config: Read for ``offload_modules``.
        parameters: Gives the weights, which stay also where views of them are saved: a copy on the
            host would free nothing.
    """

    def __init__(
        self, config: TransformerConfig, parameters: Callable[[], Iterable[Tensor]]
    ) -> None:
        self._stages = frozenset(config.offload_modules)
        self._parameters = parameters

    @classmethod
    def of(
        cls, config: TransformerConfig, parameters: Callable[[], Iterable[Tensor]]
    ) -> StageOffloading | None:
        """For this config; None if it asks for no offloading."""
        is_on = getattr(config, "fine_grained_activation_offloading", False)
        return cls(config, parameters) if is_on else None

    def run(
        self,
        name: str,
        stage: Callable[..., _Result],
        x: Tensor,
        *more: Tensor,
        kept: Sequence[Tensor] = (),
    ) -> _Result:
        """The result of ``stage(x, *more)``, a tensor or a tuple that begins with one.

        Args:
            name: In ``offload_modules``.
            stage: What saves activations.
            x: Its first input, whose gradient is complete when the stage's backward is over.
            more: Other inputs.
            kept: Other tensors that stay on the device.
        """
        if name not in self._stages or not torch.is_grad_enabled():
            return stage(x, *more)
        from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
            FineGrainedActivationOffloadingInterface,
            PipelineOffloadManager,
        )

        group = FineGrainedActivationOffloadingInterface(True, x, name)
        kept = (*kept, *self._parameters())
        with group as x, _keeping(kept, PipelineOffloadManager.get_instance()):
            found = stage(x, *more)
        return group.group_offload(found)


def on_device(function: Callable[..., _Result], *args: Any) -> _Result:
    """``function(*args)``, whose saved tensors stay on the device whatever stage it is in.

    For a checkpoint that is recomputed before the backward of its stage begins: what it has saved
    would not be back by then.
    """
    with saved_tensors_hooks(_same, _same):
        return function(*args)


@contextlib.contextmanager
def _keeping(tensors: Sequence[Tensor], manager: Any) -> Iterator[None]:
    """Exempt the memory of some tensors, views of it included, from a stage's offloading."""
    if not getattr(manager, "inside_context", False):
        # Megatron has switched offloading off for now.
        yield
        return
    kept = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def save(tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() in kept:
            return tensor
        return manager.on_save_for_backward(tensor)

    with saved_tensors_hooks(save, manager.on_get_saved_tensor):
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor
