"""Names in a distributed checkpoint, where one tensor may hold all layers or all experts.

    decoder.layers.N.<rest>                           numbered layers, or
    decoder.layers.<rest>                             stacked layers: the first dim
    <layer>mlp.experts.experts.linear_fc1.weight      stacked experts: the next dim, or
    <layer>mlp.experts.experts.E.linear_fc1.weight    one tensor per expert
    <name>.weight_w, <name>.weight_v                  the two halves of linear_fc1

The mapping to Hugging Face has numbered layers, ``mlp.experts.local_experts.E.`` and whole tensors.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.chunked_tensor import ChunkedTensor, Shape
from checkpoint_conversion.lazy_tensor import LazyTensor, concat
from checkpoint_conversion.model import ModelConfig

EXTRA_STATE = "._extra_state"
# Prefixes of training state.
_LEFT_ALONE = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state")
_LAYER, _EXPERT = "<layer>", "<expert>"
_NUMBERED_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_STACKED_LAYERS = re.compile(r"decoder\.layers\.(?!\d+\.)(.+)")
_EXPERTS = re.compile(r"(.+\.mlp\.experts\.)experts\.((?:\d+\.)?)(linear_fc[12]\..+)")
_NUMBERED_EXPERT = re.compile(r"(.+\.mlp\.experts\.)local_experts\.(\d+)\.(.+)")
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.")
_HALVES = ("_w", "_v")
# Modules that save an _extra_state: linear layers; in TransformerEngine also norms.
_LINEAR = re.compile(r"(?:.+\.)?(?:linear_\w+|eh_proj)")
_NORM = re.compile(r"(?:.+\.)?(?:\w*layernorm|enorm|hnorm)")


def is_left_alone(name: str) -> bool:
    """Whether a tensor or object is training state."""
    return name.startswith(_LEFT_ALONE)


def mtp_layer_count(names: Iterable[str]) -> int:
    """Number of MTP layers."""
    return len({match[1] for match in map(_MTP_LAYER.match, names) if match})


def are_stacked(names: Iterable[str]) -> bool:
    """Whether decoder layers are stacked."""
    return any(map(_STACKED_LAYERS.fullmatch, names))


def example_names(names: Iterable[str]) -> list[str]:
    """The mapping's names; for a stacked tensor that of the first layer and expert."""
    return [_pattern(name).replace(_LAYER, "0").replace(_EXPERT, "0") for name in names]


def numbered_tensors(
    stored: Mapping[str, ChunkedTensor], config: ModelConfig
) -> dict[str, LazyTensor]:
    """Tensors of single layers and experts, in a layout of :mod:`checkpoint_conversion.layouts`.

    Unknown names are kept, and refused by the mapping.

    Args:
        stored: The tensors of a checkpoint that belong to the model.
        config: The model's dimensions.

    Raises:
        CheckpointError: Listing tensors for other numbers of layers or experts, and duplicates.
    """
    counts = {_LAYER: config.num_layers, _EXPERT: config.num_experts}
    problems: list[str] = []
    result: dict[str, LazyTensor] = {}
    for stored_name, tensor in stored.items():
        pattern = _pattern(stored_name)
        dims = [dim for dim in (_LAYER, _EXPERT) if dim in pattern]
        expected = tuple(counts[dim] for dim in dims)
        if tensor.shape[: len(dims)] != expected:
            what = " and ".join(dim.strip("<>") + "s" for dim in dims)
            problems.append(
                f"{stored_name} has shape {tensor.shape}; for the model's {what} it would begin "
                f"with {expected}"
            )
            continue
        for index in itertools.product(*map(range, expected)):
            name = pattern
            for dim, number in zip(dims, index):
                name = name.replace(dim, str(number))
            if name in result:
                problems.append(f"{name} is there twice, once as {stored_name}")
            result[name] = tensor.lazy(*index)
    if problems:
        raise CheckpointError("The distributed checkpoint does not fit the model:", problems)
    return _with_joined_halves(result)


def _pattern(stored_name: str) -> str:
    """The mapping's name, with ``<layer>`` and ``<expert>`` for the stacked dims."""
    name = stored_name
    stacked = _STACKED_LAYERS.fullmatch(name)
    if stacked:
        name = f"decoder.layers.{_LAYER}.{stacked[1]}"
    experts = _EXPERTS.fullmatch(name)
    if experts:
        name = f"{experts[1]}local_experts.{experts[2] or _EXPERT + '.'}{experts[3]}"
    return name


def _with_joined_halves(tensors: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    result = dict(tensors)
    for name in tensors:
        whole = name.removesuffix(_HALVES[0])
        other = whole + _HALVES[1]
        if whole == name or whole in tensors or other not in tensors:
            continue
        halves = [tensors[name], tensors[other]]
        if halves[0].shape == halves[1].shape and halves[0].dtype == halves[1].dtype:
            result[whole] = concat(halves)
            del result[name], result[other]
    return result


@dataclass(frozen=True)
class Place:
    """The place of one layer's or expert's tensor in a stored tensor.

    Attributes:
        key: Name of the stored tensor.
        index: Index in the stacked dims; empty if the tensor is stored alone.
        counts: Sizes of the stacked dims.
    """

    key: str
    index: Shape = ()
    counts: Shape = ()


def place_of(name: str, stacked: bool, config: ModelConfig) -> Place:
    """Where a tensor or object of the model is stored.

    Args:
        name: In a layout of :mod:`checkpoint_conversion.layouts`.
        stacked: Whether layers are stacked.
        config: The model's dimensions.
    """
    place = Place(name)
    layer = _NUMBERED_LAYER.fullmatch(name)
    if stacked and layer:
        place = Place(f"decoder.layers.{layer[2]}", (int(layer[1]),), (config.num_layers,))
    expert = _NUMBERED_EXPERT.fullmatch(place.key)
    if expert is None:
        return place
    index, counts = (*place.index, int(expert[2])), (*place.counts, config.num_experts)
    return Place(f"{expert[1]}experts.{expert[3]}", index, counts)


def extra_state_names(
    names: Iterable[str], norms: str, stacked: bool, config: ModelConfig
) -> list[str]:
    """Names of the ``_extra_state`` objects that Megatron's modules load beside their weights.

    Loading fails if one is missing. Core attention and output layer load none.

    Args:
        names: Names of the model's tensors, in a layout.
        norms: ``"fused"`` for TransformerEngine's modules, ``"separate"`` for local ones.
        stacked: Whether layers are stacked.
        config: The model's dimensions.
    """
    result = []
    for name in names:
        module, _, parameter = name.rpartition(".")
        is_norm = _NORM.fullmatch(module) is not None
        if parameter != "weight" or not (_LINEAR.fullmatch(module) or is_norm):
            continue
        if is_norm and norms == "separate":
            continue
        place = place_of(module + EXTRA_STATE, stacked, config)
        index, counts = place.index or (0,), place.counts or (1,)
        result.append(f"{place.key}/shard_{_dotted(index)}_{_dotted(counts)}")
    return result


def _dotted(numbers: Shape) -> str:
    return ".".join(map(str, numbers))
