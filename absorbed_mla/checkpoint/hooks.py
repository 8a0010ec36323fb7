"""Hooks of ``load_state_dict``: convert the layout before it, explain misfits after it."""

from __future__ import annotations

from torch import Tensor, nn

from absorbed_mla.checkpoint.layout import MegatronLayout
from absorbed_mla.checkpoint.names import ATTENTION, EXTRA_STATE, INPUT_NORM_FUSED
from absorbed_mla.checkpoint.parameter_marks import replaces_parameters, separate_storages
from absorbed_mla.checkpoint.state_dict import (
    input_norm_error,
    recognise_layout,
    to_absorbed_state_dict,
)
from absorbed_mla.dims import MLADims


def register_load_hooks(attention: nn.Module, dims: MLADims) -> None:
    """Let an attention load every layout of ``layouts/``, and say what does not fit it.

    Args:
        attention: Of this package's layout.
        dims: Its dimensions.
    """
    hooks = _LoadHooks(dims)
    attention.register_load_state_dict_pre_hook(hooks.convert)
    attention.register_load_state_dict_post_hook(hooks.explain)


class _LoadHooks:
    """The hooks of one attention, and what the first finds out for the second.

    Misshapen keys raise at once. Whether missing and unexpected keys are errors depends on the
    caller's ``strict``, which torch does not tell its hooks; therefore the keys that torch reports
    carry their explanation with them.
    """

    def __init__(self, dims: MLADims) -> None:
        self._dims = dims
        self._prefix = ""
        self._layout: MegatronLayout | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}

    def convert(self, module, state_dict, prefix, metadata, *_torch_internals) -> None:
        """Rewrite the state dict in place.

        Raises:
            ValueError: Naming misshapen keys, both shapes and the recognised layout.
        """
        names = [key[len(prefix) :] for key in state_dict if key.startswith(prefix)]
        self._prefix, self._layout = prefix, recognise_layout(names)
        if INPUT_NORM_FUSED.removeprefix(ATTENTION) in names:
            raise input_norm_error(prefix)
        own = module.state_dict(keep_vars=True)
        down = recognise_layout(own).down
        converted: dict = {}
        if names:
            converted = to_absorbed_state_dict(state_dict, self._dims, prefix, down=down)
        state_dict.clear()
        state_dict.update(converted)
        if replaces_parameters(metadata):
            separate_storages(state_dict, prefix)
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
    """A state-dict key, equal to the plain string, that an f-string shows with an explanation."""

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
