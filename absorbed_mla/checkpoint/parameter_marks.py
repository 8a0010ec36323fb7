"""Megatron's parameter attributes, kept when ``load_state_dict`` replaces the parameters.

Megatron sets attributes on a parameter that say how its gradient is reduced
(``sequence_parallel``, ``allreduce``, ``tensor_model_parallel``, ...), here called marks. With
``assign=True`` torch makes new parameters and does not copy them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Set by DistributedDataParallel and the optimizer, which hold the parameter itself.
_HELD_BY_OTHERS = ("main_grad", "main_param")


def keep_parameter_marks(module: nn.Module) -> None:
    """Let every layer of a module keep its parameters' marks when a state dict is loaded.

    Loading with ``assign=True`` then raises ValueError once DistributedDataParallel or an optimizer
    holds the parameters: they would go on with the old ones.
    """
    hooks = _MarkHooks()
    for layer in module.modules():
        if layer._parameters:
            layer.register_load_state_dict_pre_hook(hooks.remember)
            layer.register_load_state_dict_post_hook(hooks.restore)


class _MarkHooks:
    """Carries the marks of a layer from before loading to after it."""

    def __init__(self) -> None:
        self._marks: dict[int, dict[str, dict[str, Any]]] = {}

    def remember(self, layer: nn.Module, state_dict, prefix, metadata, *_torch_internals) -> None:
        """Before loading."""
        if not replaces_parameters(metadata):
            return
        own = {name: x for name, x in layer._parameters.items() if x is not None}
        for name, parameter in own.items():
            held = [mark for mark in _HELD_BY_OTHERS if hasattr(parameter, mark)]
            if held:
                raise ValueError(
                    f"load_state_dict(assign=True) would replace {prefix}{name}, which has a "
                    f"{held[0]}: DistributedDataParallel or an optimizer holds it; load with "
                    "assign=False, or before they are made"
                )
        self._marks[id(layer)] = {name: dict(vars(parameter)) for name, parameter in own.items()}

    def restore(self, layer: nn.Module, incompatible_keys) -> None:
        """After loading."""
        for name, marks in self._marks.pop(id(layer), {}).items():
            vars(layer._parameters[name]).update(marks)


def replaces_parameters(metadata: dict) -> bool:
    """Whether ``load_state_dict`` replaces parameters, going by the metadata that its hooks get."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    return swaps or bool(metadata.get("assign_to_params_buffers"))


def separate_storages(state_dict: dict, prefix: str) -> None:
    """Copy the tensors under a prefix that share memory, as the halves of one fused weight do.

    As parameters, each would keep, and save, the whole memory.
    """
    seen: dict[int, int] = {}
    tensors = {k: v for k, v in state_dict.items() if k.startswith(prefix) and _is_dense(v)}
    for tensor in tensors.values():
        memory = tensor.untyped_storage().data_ptr()
        seen[memory] = seen.get(memory, 0) + 1
    for key, tensor in tensors.items():
        if tensor.numel() and seen[tensor.untyped_storage().data_ptr()] > 1:
            state_dict[key] = tensor.clone()


def _is_dense(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
