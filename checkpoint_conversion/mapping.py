"""Converting the tensors of whole models between Hugging Face's and Megatron's names.

Hugging Face's names are those that the files of the model type have, but for the prefix of a text
model and for experts in one tensor (``expert_stacks.py``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoint_conversion.errors import KnownNames, raise_problems
from checkpoint_conversion.lazy_tensor import LazyTensor, concat, same_values, zeros
from checkpoint_conversion.mapping_table import (
    LAYER,
    MODEL,
    MTP,
    MTP_DUPLICATES,
    Row,
    parts_of,
    widths,
)
from checkpoint_conversion.model import ModelConfig

Shape = tuple[int, ...]
_PARTS = re.compile(r"\[(\w+)\|(\w+)\]")
_COPIES_DIFFER = (
    "hold what Megatron shares between the model and its MTP layers, but differ; --exclude-mtp "
    "leaves the MTP layers out"
)
_TIED = ("model.embed_tokens.weight", "lm_head.weight")
_DIFFERS = (
    "must be equal where tie_word_embeddings is true, but differ; with false both are weights"
)


@dataclass(frozen=True)
class Pair:
    """A row of the table for one layer (and expert) of a model, with full names.

    Attributes:
        prefix: What begins Hugging Face's names of the layer; empty outside of layers.
        hugging_face: One name, or those of the tensors that Megatron has as one.
        shape: Shape of each of them.
    """

    prefix: str
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
    (embedding, *others), of_model = MODEL, parts_of(config)
    indexer = config.indexer
    yield from _expand(embedding, "", "", config, of_model, sizes)
    for layer, moe in enumerate(config.moe_layers):
        selects = indexer is not None and indexer.selects(layer)
        parts = parts_of(config, moe=moe, indexer=selects)
        prefixes = layer_prefix(config, layer), f"decoder.layers.{layer}."
        for row in LAYER:
            yield from _expand(row, *prefixes, config, parts, sizes)
    for row in others:
        yield from _expand(row, "", "", config, of_model, sizes)
    # An MTP layer is dense or MoE as the last layer of the decoder is, and shares no selection.
    moe = bool(config.moe_layers) and config.moe_layers[-1]
    parts = parts_of(config, moe=moe, indexer=indexer is not None)
    for i in range(config.mtp_layers):
        hugging_face, megatron = layer_prefix(config, config.num_layers + i), f"mtp.layers.{i}."
        for rows, inner in ((MTP, megatron), (LAYER, f"{megatron}transformer_layer.")):
            for row in rows:
                yield from _expand(row, hugging_face, inner, config, parts, sizes)


def _expand(
    row: Row,
    prefix: str,
    other: str,
    config: ModelConfig,
    has: Mapping[str, bool],
    sizes: Mapping[str, int],
) -> Iterator[Pair]:
    if not has[row.only]:
        return
    shape = tuple(sizes[word] for word in row.shape.split())
    names = _PARTS.split(prefix + own_name(config, row.hugging_face))
    # Before the brackets, the two names in them, and after the brackets.
    parts = [names[0] + part + names[3] for part in names[1:3]] if len(names) == 4 else names
    experts = range(config.num_experts) if "{expert}" in row.megatron else (None,)
    for expert in experts:
        number = "" if expert is None else str(expert)
        own = tuple(part.replace("{expert}", number) for part in parts)
        yield Pair(prefix, own, other + row.megatron.replace("{expert}", number), row, shape)


def own_name(config: ModelConfig, name: str) -> str:
    """What a model's files call a tensor of the table, without the prefix of a layer."""
    return config.model.tensors.get(name, name)


def layer_prefix(config: ModelConfig, layer: int) -> str:
    """What begins Hugging Face's names of a layer; MTP layers follow the decoder's."""
    return config.model.layer.replace("{layer}", str(layer))


def unread_norms(config: ModelConfig) -> set[str]:
    """Names of norms that files may have for dense layers, which no model reads."""
    [name] = [row.hugging_face for row in LAYER if row.only == "post_norm"]
    dense = [layer for layer, moe in enumerate(config.moe_layers) if not moe]
    normed = config.model.post_mlp_layernorm
    return {layer_prefix(config, layer) + name for layer in dense if normed}


def absent_as_zeros(names: Iterable[str], config: ModelConfig) -> dict[str, LazyTensor]:
    """Zeros for tensors of which a model's files may have none, if they have none."""
    names, result = tuple(names), {}
    for name in config.model.may_be_missing:
        if any(one.endswith(own_name(config, name)) for one in names):
            continue
        for pair in pairs(config):
            if pair.row.hugging_face == name:
                result[pair.hugging_face[0]] = zeros(pair.shape, torch.float32)
    return result


def rows_by_name(config: ModelConfig) -> dict[str, Row]:
    """Hugging Face's name of every tensor -> its row of the table."""
    return {name: pair.row for pair in pairs(config) for name in pair.hugging_face}


def duplicates(config: ModelConfig) -> dict[str, str]:
    """Tensors that Hugging Face stores twice: name of the copy -> name of the original."""
    head = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    originals = {**MTP_DUPLICATES, "shared_head.head.weight": head}
    return {
        layer_prefix(config, config.num_layers + i) + own_name(config, name): own_name(
            config, original
        )
        for i in range(config.mtp_layers)
        for name, original in originals.items()
    }


def count_mtp_layers(names: Iterable[str], config: ModelConfig) -> int:
    """Number of multi-token-prediction layers that Hugging Face's files hold."""
    known = set(names)
    inner = [
        own_name(config, name) for name in (*(row.hugging_face for row in MTP), *MTP_DUPLICATES)
    ]
    count = 0
    while any(layer_prefix(config, config.num_layers + count) + name in known for name in inner):
        count += 1
    return count


def hugging_face_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of an unquantised Hugging Face checkpoint, with its shape."""
    shapes = {name: pair.shape for pair in pairs(config) for name in pair.hugging_face}
    return shapes | {name: shapes[original] for name, original in duplicates(config).items()}


def megatron_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of a Megatron model without parallelism, with its shape."""
    return {pair.megatron: pair.megatron_shape for pair in pairs(config)}


def to_megatron(tensors: Mapping[str, LazyTensor], config: ModelConfig) -> dict[str, LazyTensor]:
    """A model's unquantised tensors under Megatron's names.

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
        result[pair.megatron] = _in_pairs(concat(parts), pair.row, config)
    return result


def _in_pairs(
    tensor: LazyTensor, row: Row, config: ModelConfig, *, back: bool = False
) -> LazyTensor:
    """A tensor whose rotary channels are pairs of neighbours; ``back``: as the model has them."""
    if config.model.rope_interleave:
        return tensor
    others = {"heads*qk": config.qk_nope_head_dim, "kv_rank+rope": config.kv_lora_rank}
    kept_rows, rope = others.get(row.shape.split()[0]), config.qk_rope_head_dim
    if kept_rows is None:
        return tensor

    def permute(values: Tensor) -> Tensor:
        blocks = values.unflatten(0, (-1, kept_rows + rope))
        kept, rotary = blocks.split([kept_rows, rope], dim=1)
        rotary = rotary.unflatten(1, (-1, 2) if back else (2, -1)).transpose(1, 2)
        return torch.cat((kept, rotary.flatten(1, 2)), dim=1).flatten(0, 1)

    return tensor.map(permute)


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
        tensor = _in_pairs(tensors[pair.megatron], pair.row, config, back=True)
        parts = tensor.chunk(len(pair.hugging_face))
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
    extra = tuple(layer_prefix(config, config.num_layers + i) for i in range(config.mtp_layers))
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(extra)}


def without_tied_head(
    tensors: Mapping[str, LazyTensor], config: ModelConfig, problems: list[str]
) -> dict[str, LazyTensor]:
    """The tensors without an output layer that is a copy of the embedding.

    The two are compared bit by bit when the embedding is loaded.

    Args:
        tensors: Under Hugging Face's or Megatron's names.
        config: Of the model; one that is not tied needs its output layer.
        problems: Receives a line if the two cannot be equal.
    """
    result = dict(tensors)
    rows = [next(row for row in MODEL if row.hugging_face == name) for name in _TIED]
    own = [own_name(config, name) for name in _TIED]
    for first, head in (own, [row.megatron for row in rows]):
        if not config.tied_embeddings or first not in result or head not in result:
            continue
        copies = [result[first], result.pop(head)]
        kinds = [f"{tensor.dtype} {tensor.shape}" for tensor in copies]
        if len(set(kinds)) > 1:
            problems.append(
                f"{head} is {kinds[1]}; tie_word_embeddings says it is {first}, which is {kinds[0]}"
            )
        else:
            result[first] = same_values(copies, _DIFFERS)
    return result


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
    raise_problems(f"{what} do not fit the model; {len(problems)} problems:", problems)


def _check_dtypes(tensors: Mapping[str, LazyTensor], config: ModelConfig) -> None:
    groups = [pair.hugging_face for pair in pairs(config)] + list(duplicates(config).items())
    problems = [
        f"{' and '.join(names)} must be of one dtype; got "
        + " and ".join(str(tensors[name].dtype) for name in names)
        for names in groups
        if len({tensors[name].dtype for name in names}) > 1
    ]
    raise_problems("Tensors that Megatron keeps as one differ in dtype:", problems)
