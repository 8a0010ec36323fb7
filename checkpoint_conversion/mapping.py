"""Converting the tensors of whole models between Hugging Face's and Megatron's names.

Hugging Face's names are DeepSeek's. Files of models of text and images have a prefix before them,
and those of Mistral 4 hold a layer's experts as one tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from checkpoint_conversion.errors import CheckpointError, KnownNames
from checkpoint_conversion.lazy_tensor import LazyTensor, concat, same_values
from checkpoint_conversion.mapping_table import (
    GATED,
    LAYER,
    MODEL,
    MTP,
    MTP_DUPLICATES,
    LayerKind,
    Row,
    widths,
)
from checkpoint_conversion.model import ModelConfig

Shape = tuple[int, ...]
_COPIES_DIFFER = (
    "hold what Megatron shares between the model and its MTP layers, but differ; --exclude-mtp "
    "leaves the MTP layers out"
)


@dataclass(frozen=True)
class Pair:
    """A row of the table for one layer (and expert) of a model, with full names."""

    hugging_face: tuple[str, ...]
    megatron: str
    row: Row
    shape: Shape

    @property
    def megatron_shape(self) -> Shape:
        """Shape of Megatron's tensor, which may stack several of Hugging Face's."""
        return (self.shape[0] * len(self.hugging_face), *self.shape[1:])


def pairs(config: ModelConfig) -> Iterator[Pair]:
    """Every tensor of a model with its names on both sides, in the order of the model."""
    sizes = widths(config)
    embedding, norm, head = MODEL
    indexer = config.indexer
    yield from _expand(embedding, "", "", config, LayerKind(), sizes)
    for layer, moe in enumerate(config.moe_layers):
        kind = LayerKind(moe, indexer is not None and indexer.selects(layer))
        for row in LAYER:
            prefixes = f"model.layers.{layer}.", f"decoder.layers.{layer}."
            yield from _expand(row, *prefixes, config, kind, sizes)
    for row in (norm, head):
        yield from _expand(row, "", "", config, LayerKind(), sizes)
    # An MTP layer is dense or MoE as the last layer of the decoder is, and shares no selection.
    moe = bool(config.moe_layers) and config.moe_layers[-1]
    kind = LayerKind(moe, indexer is not None)
    for i in range(config.mtp_layers):
        hugging_face, megatron = f"model.layers.{config.num_layers + i}.", f"mtp.layers.{i}."
        for row in MTP:
            yield from _expand(row, hugging_face, megatron, config, kind, sizes)
        for row in LAYER:
            inner = f"{megatron}transformer_layer."
            yield from _expand(row, hugging_face, inner, config, kind, sizes)


def _expand(
    row: Row, prefix: str, other: str, config: ModelConfig, kind: LayerKind, sizes: dict[str, int]
) -> Iterator[Pair]:
    if not row.condition(config, kind):
        return
    shape = tuple(sizes[word] for word in row.shape.split())
    experts = range(config.num_experts) if "{expert}" in row.megatron else (None,)
    for expert in experts:
        number = "" if expert is None else str(expert)
        name = prefix + row.hugging_face.replace("{expert}", number)
        names = tuple(name.replace("[gate|up]", part) for part in ("gate", "up"))
        megatron = other + row.megatron.replace("{expert}", number)
        yield Pair(names if row.transform is GATED else names[:1], megatron, row, shape)


def duplicates(config: ModelConfig) -> dict[str, str]:
    """Tensors that Hugging Face stores twice: name of the copy -> name of the original."""
    head = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    originals = {**MTP_DUPLICATES, "shared_head.head.weight": head}
    return {
        f"model.layers.{config.num_layers + i}.{name}": original
        for i in range(config.mtp_layers)
        for name, original in originals.items()
    }


def hugging_face_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of an unquantised Hugging Face checkpoint, with its shape."""
    shapes = {name: pair.shape for pair in pairs(config) for name in pair.hugging_face}
    return shapes | {name: shapes[original] for name, original in duplicates(config).items()}


def megatron_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of a Megatron model without parallelism, with its shape."""
    return {pair.megatron: pair.megatron_shape for pair in pairs(config)}


def to_megatron(tensors: Mapping[str, LazyTensor], config: ModelConfig) -> dict[str, LazyTensor]:
    """A model's tensors under Megatron's names.

    Args:
        tensors: Under Hugging Face's names, unquantised.
        config: The model.

    Raises:
        CheckpointError: Listing every tensor that is unknown, missing, misshapen or of another
            dtype than the tensors it is stacked with.
    """
    check_complete(tensors, hugging_face_shapes(config), "The Hugging Face tensors")
    _check_dtypes(tensors, config)
    copies: dict[str, list[str]] = {}
    for name, original in duplicates(config).items():
        copies.setdefault(original, []).append(name)
    result = {}
    for pair in pairs(config):
        parts = [
            same_values([tensors[one] for one in (name, *copies.get(name, []))], _COPIES_DIFFER)
            for name in pair.hugging_face
        ]
        result[pair.megatron] = pair.row.transform.to_megatron(parts)
    return result


def to_hugging_face(
    tensors: Mapping[str, LazyTensor], config: ModelConfig
) -> dict[str, LazyTensor]:
    """A model's tensors under Hugging Face's names; the inverse of :func:`to_megatron`.

    Raises:
        CheckpointError: Listing every tensor that is unknown, missing or misshapen.
    """
    check_complete(tensors, megatron_shapes(config), "The Megatron tensors")
    result: dict[str, LazyTensor] = {}
    for pair in pairs(config):
        parts = pair.row.transform.to_hugging_face(tensors[pair.megatron])
        result.update(zip(pair.hugging_face, parts))
    return result | {name: result[original] for name, original in duplicates(config).items()}


def count_parameters(shapes: Mapping[str, Shape], config: ModelConfig) -> int:
    """Number of weights of a model; what Hugging Face stores twice counts once."""
    copies = duplicates(config)
    return sum(math.prod(shape) for name, shape in shapes.items() if name not in copies)


def without_mtp_layers(
    tensors: Mapping[str, LazyTensor], config: ModelConfig
) -> dict[str, LazyTensor]:
    """The tensors, by Hugging Face name, that belong to no multi-token-prediction layer."""
    extra = tuple(f"model.layers.{config.num_layers + i}." for i in range(config.mtp_layers))
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(extra)}


def check_complete(
    tensors: Mapping[str, LazyTensor], expected: Mapping[str, Shape], what: str
) -> None:
    """Check names, shapes and dtypes of the tensors of a checkpoint.

    Args:
        tensors: The tensors that are there.
        expected: Shape of each expected tensor, by name.
        what: What the tensors are; begins the message.

    Raises:
        CheckpointError: Listing everything that is unknown, missing or misshapen, or holds no
            floating-point numbers of 16 bits or more.
    """
    missing = [name for name in expected if name not in tensors]
    problems = [f"{name} is missing; expected shape {expected[name]}" for name in missing]
    absent, known = KnownNames(missing), KnownNames(expected)
    for name, tensor in tensors.items():
        if name not in expected:
            near = absent.nearest(name) or known.nearest(name)
            hint = f"; the nearest known name is {near}" if near else ""
            problems.append(f"{name} of shape {tensor.shape} is unknown{hint}")
        elif tensor.shape != expected[name]:
            problems.append(f"{name} has shape {tensor.shape}; expected {expected[name]}")
        elif tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            problems.append(f"{name} is {tensor.dtype}; expected bfloat16, float16 or float32")
    if problems:
        raise CheckpointError(f"{what} do not fit the model; {len(problems)} problems:", problems)


def _check_dtypes(tensors: Mapping[str, LazyTensor], config: ModelConfig) -> None:
    groups = [pair.hugging_face for pair in pairs(config)] + list(duplicates(config).items())
    problems = [
        f"{' and '.join(names)} must be of one dtype; got "
        + " and ".join(str(tensors[name].dtype) for name in names)
        for names in groups
        if len({tensors[name].dtype for name in names}) > 1
    ]
    if problems:
        raise CheckpointError("Tensors that Megatron keeps as one differ in dtype:", problems)


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
