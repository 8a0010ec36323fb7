"""What happens around ``load_state_dict`` of an attention: conversion before, explanation after."""

from __future__ import annotations

from torch import Tensor, nn

from absorbed_mla.checkpoint.parameter_marks import replaces_parameters, separate_storages
from absorbed_mla.checkpoint.state_dict import (
    EXTRA_STATE,
    FUSED_INPUT_NORM,
    StandardLayout,
    input_norm_error,
    to_absorbed_state_dict,
)


class StandardLayoutHooks:
    """Lets an attention load every layout that ``state_dict.py`` knows.

    Misshapen keys raise at once. Whether missing and extra ones are errors is the caller's choice
    (``strict``), of which torch tells its hooks nothing; the keys that torch reports are made to
    explain themselves instead.
    """

    def __init__(self, attention: nn.Module) -> None:
        self._prefix = ""
        self._layout: StandardLayout | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        attention.register_load_state_dict_pre_hook(self.convert)
        attention.register_load_state_dict_post_hook(self.explain)

    def convert(self, module, state_dict, prefix, metadata, *_torch_internals) -> None:
        """Rewrite the state dict in place.

        Raises:
            ValueError: Naming misshapen keys, both shapes and the recognised layout.
        """
        names = [key[len(prefix) :] for key in state_dict if key.startswith(prefix)]
        self._prefix, self._layout = prefix, StandardLayout.recognise(names)
        if FUSED_INPUT_NORM in names:
            raise input_norm_error(prefix)
        converted = to_absorbed_state_dict(state_dict, module.dims, prefix) if names else {}
        state_dict.clear()
        state_dict.update(converted)
        if replaces_parameters(metadata):
            separate_storages(state_dict, prefix)
        own = module.state_dict(keep_vars=True)
        _match_extra_states(state_dict, prefix, own)
        # Shapes, not tensors: the hooks outlive the state dict.
        self._shapes = {
            k[len(prefix) :]: _shape(v) for k, v in state_dict.items() if k.startswith(prefix)
        }
        problems = [
            f"{prefix}{name} has shape {shape}, this model needs {_shape(own[name])}"
            for name, shape in self._shapes.items()
            if isinstance(own.get(name), Tensor)
            and not name.endswith(EXTRA_STATE)
            and shape != _shape(own[name])
        ]
        if problems:
            raise ValueError(f"{'; '.join(problems)} ({self._recognised})")

    def explain(self, module, incompatible_keys) -> None:
        """Add shapes and layout to the missing and extra keys that torch found."""
        own = {name: _shape(v) for name, v in module.state_dict(keep_vars=True).items()}
        for keys, shapes, text in (
            (incompatible_keys.missing_keys, own, "is missing, this model needs {}"),
            (incompatible_keys.unexpected_keys, self._shapes, "of shape {} has no place in it"),
        ):
            for i, key in enumerate(keys):
                name = key.removeprefix(self._prefix)
                if key.startswith(self._prefix) and name in shapes:
                    explanation = f"{text.format(shapes[name])} ({self._recognised})"
                    keys[i] = ExplainedKey(key, explanation)

    @property
    def _recognised(self) -> str:
        return f"recognised layout: {self._layout}"


class ExplainedKey(str):
    """A state-dict key that is itself, but explains itself where a message formats it."""

    explanation: str

    def __new__(cls, key: str, explanation: str) -> ExplainedKey:
        """Attach the explanation."""
        explained = super().__new__(cls, key)
        explained.explanation = explanation
        return explained

    def __reduce__(self) -> tuple:
        return type(self), (self[:], self.explanation)

    def __deepcopy__(self, memo: dict) -> ExplainedKey:
        return self  # as immutable as any str

    def __format__(self, spec: str) -> str:
        return f"{self[:]} {self.explanation}"


def _shape(value: object) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def _match_extra_states(state_dict: dict, prefix: str, own: dict) -> None:
    """Drop the extra states of layers that keep none; add empty ones where none was written."""
    for key in [k for k in state_dict if k.startswith(prefix) and k.endswith(EXTRA_STATE)]:
        if key[len(prefix) :] not in own:
            del state_dict[key]
    for name in own:
        if name.endswith(EXTRA_STATE):
            state_dict.setdefault(prefix + name, None)
