"""The host's marks on parameters, kept where ``load_state_dict`` puts other tensors in their place.

Megatron writes on a parameter how its gradient is reduced (``sequence_parallel``, ``allreduce``,
``tensor_model_parallel``, ...). ``assign=True`` makes new parameters, and torch copies no marks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Whoever wrote these holds the parameter itself: DistributedDataParallel, the optimizer.
_HELD_BY_OTHERS = ("main_grad", "main_param")


class ParameterMarks:
    """Lets every layer of a module keep its parameters' marks.

    Raises:
        ValueError: When a state dict is loaded with ``assign=True`` after DistributedDataParallel
            or an optimizer took the parameters, which would go on with the old ones.
    """

    def __init__(self, module: nn.Module) -> None:
        self._marks: dict[int, dict[str, dict[str, Any]]] = {}
        for layer in module.modules():
            if layer._parameters:
                layer.register_load_state_dict_pre_hook(self.remember)
                layer.register_load_state_dict_post_hook(self.restore)

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
    """Whether ``load_state_dict`` puts tensors in place of parameters, by what it tells hooks."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    return swaps or bool(metadata.get("assign_to_params_buffers"))


def separate_storages(state_dict: dict, prefix: str) -> None:
    """Copy the tensors under a prefix that share memory, as the halves of one fused weight do.

    As parameters they would be saved with all of it, each.
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
