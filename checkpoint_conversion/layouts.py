"""Layouts of Megatron models: names, tensor-parallel rules, padding of the vocabulary.

What the layouts are is declared in ``absorbed_mla/checkpoint/layouts``; the table of names is in
the default layout of ``absorbed_mla/checkpoint/layout.py``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from absorbed_mla.checkpoint.layout import LayoutChange, MegatronLayout
from absorbed_mla.checkpoint.names import ATTENTION_NORMS
from absorbed_mla.registry import CHECKPOINT_LAYOUTS
from checkpoint_conversion.errors import CheckpointError, raise_problems
from checkpoint_conversion.lazy_tensor import LazyTensor, concat, zeros
from checkpoint_conversion.mapping_table import LAYER, MODEL, MTP, Rule
from checkpoint_conversion.model import ModelConfig

# The tensors with one row per entry of the vocabulary, which Megatron pads with further rows.
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_LAYER = re.compile(r"(decoder\.layers\.\d+\.|mtp\.layers\.\d+\.transformer_layer\.)(.+)")
_PREFIX = re.compile(r"(decoder\.layers\.\d+\.|mtp\.layers\.\d+\.(transformer_layer\.)?)?")
_RULES = {row.megatron: row.split for row in (*MODEL, *LAYER, *MTP)}


def target_layout(to: str, norms: str | None = None, **choices: str) -> MegatronLayout:
    """The layout of a target.

    Args:
        to: Its format.
        norms: None: fused, but separate in this package's own checkpoints.
        choices: Values of the other options of a layout.
    """
    return MegatronLayout(norms=norms or ("separate" if to == "absorbed" else "fused"), **choices)


def canonical_tensors(
    tensors: Mapping[str, LazyTensor], config: ModelConfig
) -> dict[str, LazyTensor]:
    """Bring whole tensors with numbered layers from any layout to the table's names.

    What no layout names stays as it is, for the mapping to refuse.

    Raises:
        CheckpointError: Listing tensors that are there in two layouts, or whose shape cannot be
            split.
    """
    return _in_layout(tensors, MegatronLayout(), config)


def laid_out_tensors(
    tensors: Mapping[str, LazyTensor], layout: MegatronLayout, config: ModelConfig
) -> dict[str, LazyTensor]:
    """The inverse of :func:`canonical_tensors`.

    Raises:
        CheckpointError: If the model has no such layout.
    """
    for one in CHECKPOINT_LAYOUTS:
        why_not = one.why_not(config) if layout.includes(one) else None
        if why_not is not None:
            raise CheckpointError(f"--{one.option.replace('_', '-')} {one.value} {why_not}")
    if config.indexer and layout.down == "fused":
        raise CheckpointError("--down fused: Megatron's sparse attention has separate ones")
    return _in_layout(tensors, layout, config)


def _in_layout(
    tensors: Mapping[str, LazyTensor], layout: MegatronLayout, config: ModelConfig
) -> dict[str, LazyTensor]:
    change: LayoutChange[LazyTensor] = LayoutChange(
        layout,
        config,
        config.num_attention_heads,
        concat,
        lambda x, shape: x.view(*shape),
        kept=ATTENTION_NORMS if config.indexer else (),
    )
    layers: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        layer, inner = (match[1], match[2]) if match else ("", name)
        layers.setdefault(layer, {})[inner] = tensor
    result = {}
    for layer, weights in layers.items():
        changed = change.apply(weights, layer.__add__)
        result.update({layer + name: tensor for name, tensor in changed.items()})
    raise_problems("The Megatron tensors do not fit the layout:", change.problems)
    return result


def default_name(name: str) -> str | None:
    """The table's name, relative to the layer, of a weight that only some layout has."""
    names = (one.default_name(name) for one in CHECKPOINT_LAYOUTS)
    return next((found for found in names if found is not None), None)


def padded_size(vocab_size: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that has room for ``vocab_size`` rows."""
    return -(-vocab_size // multiple) * multiple


def with_padding(tensors: Mapping[str, LazyTensor], rows: int) -> dict[str, LazyTensor]:
    """Append rows of zeros to embedding and output layer until they have ``rows``."""
    result = dict(tensors)
    for name in VOCABULARY:
        tensor = tensors.get(name)
        if tensor is not None and rows > tensor.shape[0]:
            padding = zeros((rows - tensor.shape[0], *tensor.shape[1:]), tensor.dtype)
            result[name] = concat([tensor, padding])
    return result


def without_padding(tensors: Mapping[str, LazyTensor], vocab_size: int) -> dict[str, LazyTensor]:
    """Drop the rows beyond the vocabulary, which no token uses."""
    result = dict(tensors)
    for name in VOCABULARY:
        tensor = tensors.get(name)
        if tensor is not None and tensor.shape and tensor.shape[0] > vocab_size:
            kept = tensor.narrow(0, 0, vocab_size)
            # Where ranks share the rows, the last may have nothing but padding.
            result[name] = dataclasses.replace(kept, leaves=tensor.leaves)
    return result


def tensor_parallel_rule(name: str) -> Rule | None:
    """How ranks split the tensor called ``name``, in any layout; None for an unknown name.

    Down-projections count as replicated, as in TransformerEngine's layers; local layers split their
    rows instead.
    """
    prefix = _PREFIX.match(name)
    inner = name[prefix.end() :] if prefix else name
    rule = _RULES.get(re.sub(r"local_experts\.\d+\.", "local_experts.{expert}.", inner))
    # Weights that a layout renames, joins or splits are shared like those of the table.
    return rule or _RULES.get(default_name(inner) or "")
