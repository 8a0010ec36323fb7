"""Models whose files name or stack tensors differently from DeepSeek's.

The table of names is DeepSeek's. Models of text and images have a prefix before their text model,
and Mistral 4 stores a layer's experts as one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.lazy_tensor import LazyTensor, concat
from checkpoint_conversion.model import ModelConfig

_TEXT = "language_model."
# Prefixes of what a model of text and images has beside its text model.
_IMAGES = ("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector.")
# transformers 5.23 saves Kimi-K2.5's layers as blocks.
_BLOCKS = re.compile(r"model\.blocks\.(?=\d)")
_EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
_STACKS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


def image_tensors(names: Sequence[str]) -> list[str]:
    """Names of tensors that are not part of the text model."""
    if not any(name.startswith(_TEXT) for name in names):
        return []
    return [name for name in names if name.startswith(_IMAGES)]


def text_name(name: str) -> str:
    """The name of a text model's tensor in a file that holds the text model alone."""
    if not name.startswith(_TEXT):
        return name
    return _BLOCKS.sub("model.layers.", name.removeprefix(_TEXT), count=1)


def stacks_experts(config: ModelConfig) -> bool:
    """Whether files hold the experts of a layer as one tensor."""
    return config.model_type == "mistral4"


def unstacked(tensors: Mapping[str, LazyTensor], config: ModelConfig) -> dict[str, LazyTensor]:
    """Split stacked experts into the tensors of each expert, for models that stack them.

    A stack of another shape stays as it is, and is refused later as unknown.
    """
    if not stacks_experts(config):
        return dict(tensors)
    rows = {"gate": config.moe_ffn_hidden_size, "up": config.moe_ffn_hidden_size}
    rows["down"] = config.hidden_size
    result = {}
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".")
        parts = _STACKS.get(kind, ())
        columns = config.moe_ffn_hidden_size if kind == "down_proj" else config.hidden_size
        stack = (config.num_experts, sum(rows[part] for part in parts), columns)
        if not prefix.endswith(".mlp.experts") or tensor.shape != stack:
            result[name] = tensor
            continue
        for number, expert in enumerate(tensor.chunk(config.num_experts)):
            for part, one in zip(parts, expert.split([rows[part] for part in parts], dim=1)):
                result[f"{prefix}.{number}.{part}_proj.weight"] = one.view(*one.shape[1:])
    return result


def stacked(tensors: Mapping[str, LazyTensor], config: ModelConfig) -> dict[str, LazyTensor]:
    """The inverse of :func:`unstacked`.

    Raises:
        CheckpointError: If tensors of one stack differ in dtype.
    """
    if not stacks_experts(config):
        return dict(tensors)
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        match = _EXPERTS.fullmatch(name)
        if match is None:
            result[name] = tensor
            continue
        prefix, _, part = match.groups()
        kind, parts = next((kind, parts) for kind, parts in _STACKS.items() if part in parts)
        if prefix + kind not in result:
            names = [
                f"{prefix}{number}.{one}_proj.weight"
                for number in range(config.num_experts)
                for one in parts
            ]
            result[prefix + kind] = _stack(prefix + kind, [tensors[n] for n in names], len(parts))
    return result


def _stack(name: str, tensors: Sequence[LazyTensor], each: int) -> LazyTensor:
    """One tensor of all experts, from ``each`` tensors per expert."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        found = " and ".join(sorted(map(str, dtypes)))
        raise CheckpointError(f"{name} would be {found}; --dtype makes its experts the same")
    rows, columns = tensors[0].shape
    shape = (len(tensors) // each, each * rows, columns)
    flat = concat(tensors)
    # LazyTensor.view would count the memory of a copy, which is not made here.
    return LazyTensor(
        shape, flat.dtype, lambda session: flat.load(session).view(shape), flat.leaves, flat.peak
    )
