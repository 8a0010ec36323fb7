"""Names within one rank's file, where layers and experts are numbered from 0 on every rank.

Whole models, and the mapping, number them through:

    decoder.layers.<in the stage>                     decoder.layers.<in the model>
    mtp.layers.I.mtp_model_layer.                     mtp.layers.I.transformer_layer.
    mlp.experts.local_experts.<on the rank>.          mlp.experts.local_experts.<of the layer>.
    mlp.experts.linear_fc1.weight<on the rank>        the same
"""

from __future__ import annotations

import re
from collections.abc import Iterable

EXTRA_STATE = "_extra_state"
_DECODER_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.")
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d{1,2})\.")
_MTP_INNER = re.compile(r"(mtp\.layers\.\d+\.)(?:mtp_model_layer|transformer_layer)\.")
_SEQUENTIAL = re.compile(r"(.*mlp\.experts\.)local_experts\.(\d+)\.(linear_fc[12])\.weight")
_GROUPED = re.compile(r"(.*mlp\.experts\.)(linear_fc[12])\.weight(\d+)")
_NORM = re.compile(r".*(layernorm|enorm|hnorm)")
_LINEAR = re.compile(r".*(linear_\w+|eh_proj|output_layer)")


def layer_count(names: Iterable[str]) -> int:
    """How many decoder layers a stage has, by its names."""
    return _count(_DECODER_LAYER, names)


def mtp_layer_count(names: Iterable[str]) -> int:
    """How many MTP layers a stage has, by its names."""
    return _count(_MTP_LAYER, names)


def decoder_layer(name: str) -> int | None:
    """The decoder layer that a tensor belongs to; None for a tensor of none."""
    match = _DECODER_LAYER.match(name)
    return None if match is None else int(match[1])


def expert_number(name: str) -> int | None:
    """The routed expert that a tensor, in the mapping's naming, belongs to."""
    match = _SEQUENTIAL.fullmatch(name)
    return None if match is None else int(match[2])


def experts_kind(names: Iterable[str]) -> str:
    """Which module's names the routed experts have."""
    for name in names:
        if _GROUPED.fullmatch(name):
            return "grouped"
        if _SEQUENTIAL.fullmatch(name):
            return "sequential"
    return "GroupedMLP"


def in_the_model(name: str, first_layer: int, first_expert: int) -> str:
    """The name in the whole model, given the first layer and expert that the rank has."""
    name = _shift_layer(name, first_layer)
    match = _SEQUENTIAL.fullmatch(name)
    return name if match is None else _sequential(match, first_expert)


def on_the_rank(name: str, first_layer: int, first_expert: int) -> str:
    """The inverse of :func:`in_the_model`."""
    return in_the_model(name, -first_layer, -first_expert)


def as_mapped(name: str) -> str:
    """The mapping's name for the inside of an MTP layer, and for an expert of a grouped module."""
    name = _MTP_INNER.sub(r"\1transformer_layer.", name)
    match = _GROUPED.fullmatch(name)
    return name if match is None else f"{match[1]}local_experts.{match[3]}.{match[2]}.weight"


def as_stored(name: str, experts: str) -> str:
    """The name in a state dict of megatron-core 0.19; the inverse of :func:`as_mapped`.

    Args:
        name: The mapping's.
        experts: ``"sequential"`` or ``"grouped"``.
    """
    name = _MTP_INNER.sub(r"\1mtp_model_layer.", name)
    match = _SEQUENTIAL.fullmatch(name)
    if match is None or experts == "sequential":
        return name
    return f"{match[1]}{match[3]}.weight{match[2]}"


def extra_states(names: Iterable[str], norms: str, last_stage: bool) -> list[str]:
    """The ``_extra_state`` keys that loading asks for, beside the weights called ``names``.

    Local linear layers have one each, always None. TransformerEngine's norms and its core attention
    have one too.

    Args:
        names: As stored.
        norms: ``"fused"`` for TransformerEngine's layers, ``"separate"`` for local ones.
        last_stage: Whether the output layer is there; it has one even if it has no weight.
    """
    modules = ["output_layer"] if last_stage else []
    for name in names:
        module = name.rpartition(".")[0]
        if _LINEAR.fullmatch(module) or (norms == "fused" and _NORM.fullmatch(module)):
            modules.append(module)
        if norms == "fused" and module.endswith(".linear_proj"):
            modules.append(module.removesuffix("linear_proj") + "core_attention")
    return [f"{module}.{EXTRA_STATE}" for module in dict.fromkeys(modules)]


def _count(pattern: re.Pattern, names: Iterable[str]) -> int:
    return max((int(match[1]) + 1 for match in map(pattern.match, names) if match), default=0)


def _shift_layer(name: str, by: int) -> str:
    match = _DECODER_LAYER.match(name)
    return name if match is None else f"decoder.layers.{int(match[1]) + by}.{name[match.end() :]}"


def _sequential(match: re.Match, shift: int) -> str:
    return f"{match[1]}local_experts.{int(match[2]) + shift}.{match[3]}.weight"
