"""LoRA of a whole model: put on, merged, taken off."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from absorbed_mla.attention import AbsorbedMLASelfAttention
from absorbed_mla.dsa.warm_up import train_only
from absorbed_mla.lora.adapter import AttentionLoRA, layers_of, lora_of
from absorbed_mla.lora.config import LoRAConfig

Model = nn.Module | Sequence[nn.Module]
# In the names of its parameters.
IN_NAMES = ".lora_"
_NO_DECODER = re.compile(r"(^|\.)mtp\.")


def attentions(model: Model) -> Iterator[AbsorbedMLASelfAttention]:
    """The attentions of a model, or of a rank's model chunks, but those of multi-token prediction.

    Their ``layer_number`` counts from 1 over all pipeline stages.
    """
    for chunk in _chunks(model):
        for name, module in chunk.named_modules():
            if isinstance(module, AbsorbedMLASelfAttention) and not _NO_DECODER.search(name):
                yield module


def add_lora(model: Model, config: LoRAConfig) -> None:
    """Put LoRA on the attentions of a model, and freeze everything else.

    Call it after the weights are loaded, and before the model is wrapped in Megatron's
    DistributedDataParallel. What the model computes stays as it is, since B is zero.

    Args:
        model: This rank's part of it, or its model chunks.
        config: Which layers, and their rank.

    Raises:
        ValueError: If the model has no such layer or LoRA already, is wrapped, has sparse
            attention, or clips queries and keys (``qk_clip``).
    """
    put_on(
        model,
        lambda attention: {
            name: (config.r, config.scaling)
            for name in layers_of(attention)
            if name in config.layers and config.has_layer(attention.layer_number - 1)
        },
    )


def put_on(model: Model, layers) -> None:
    """:func:`add_lora` with ``layers(attention)``: r and scaling of each of its layers."""
    chosen = [(attention, layers(attention)) for attention in attentions(model)]
    if not any(layers for _, layers in chosen) and not is_one_of_several_stages(model):
        raise ValueError("LoRA needs a layer of an AbsorbedMLASelfAttention; none is named")
    for attention, named in chosen:
        if named:
            AttentionLoRA(attention, named)
    for chunk in _chunks(model):
        train_only(chunk, IN_NAMES)


def is_one_of_several_stages(model: Model) -> bool:
    """Whether other pipeline stages may have what this rank's part of a model lacks."""
    configs = [getattr(chunk, "config", None) for chunk in _chunks(model)]
    return any(getattr(one, "pipeline_model_parallel_size", 1) > 1 for one in configs)


def _chunks(model: Model) -> Sequence[nn.Module]:
    return [model] if isinstance(model, nn.Module) else model


def _those_with(model: Model) -> Iterable[tuple[AbsorbedMLASelfAttention, AttentionLoRA]]:
    found = [(attention, lora_of(attention)) for attention in attentions(model)]
    pairs = [(attention, lora) for attention, lora in found if lora is not None]
    if not pairs and not is_one_of_several_stages(model):
        raise ValueError("the model has no LoRA: add_lora first")
    return pairs


def merge_lora(model: Model) -> None:
    """Add every update to its weight, for generation without further products.

    The former weights are kept, once more the memory of the layers with LoRA. Nothing changes in
    parameters that are merged already.

    Raises:
        ValueError: If the model has no LoRA, or weights are in FP8.
    """
    for attention, lora in _those_with(model):
        if not lora.merged:
            lora.merge(attention)


def unmerge_lora(model: Model) -> None:
    """The inverse of :func:`merge_lora`, to the bit.

    Raises:
        ValueError: If the model has no LoRA.
    """
    for attention, lora in _those_with(model):
        if lora.merged:
            lora.unmerge(attention)


def remove_lora(model: Model) -> None:
    """Take LoRA off; weights stay as they are, merged or not, and frozen.

    Raises:
        ValueError: If the model has no LoRA.
    """
    for attention, lora in _those_with(model):
        lora.remove(attention)
