"""The layouts in which Megatron models keep the same weights, to and from the mapping's.

norms   separate: modules of their own (local layers)
        fused: part of the linear layer behind them (TransformerEngine)
kv_up   combined: ``linear_kv_up_proj``, per head rows [K; V]
        split: ``linear_k_up_proj`` and ``linear_v_up_proj``
down    separate: ``linear_q_down_proj`` and ``linear_kv_down_proj``
        fused: ``linear_qkv_down_proj``, rows [Q; KV]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.lazy_tensor import LazyTensor, concat
from checkpoint_conversion.model_config import ModelConfig
from checkpoint_conversion.split_rules import REPLICATED, ROWS, Rule

ATTENTION = "self_attention."
KV_UP = f"{ATTENTION}linear_kv_up_proj.weight"
K_UP, V_UP = f"{ATTENTION}linear_k_up_proj.weight", f"{ATTENTION}linear_v_up_proj.weight"
Q_DOWN, KV_DOWN = (
    f"{ATTENTION}linear_q_down_proj.weight",
    f"{ATTENTION}linear_kv_down_proj.weight",
)
QKV_DOWN = f"{ATTENTION}linear_qkv_down_proj.weight"
INPUT_NORM = "input_layernorm.weight"
QKV_DOWN_NORM = f"{ATTENTION}linear_qkv_down_proj.layer_norm_weight"
MLP_NORM, MLP_NORM_FUSED = "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"
# Separate name -> fused name, where one is always the other.
NORMS = {
    f"{ATTENTION}q_layernorm.weight": f"{ATTENTION}linear_q_up_proj.layer_norm_weight",
    f"{ATTENTION}kv_layernorm.weight": f"{ATTENTION}linear_kv_up_proj.layer_norm_weight",
}
# How ranks share the tensors that only a layout has, by the end of the name.
SPLIT: dict[str, Rule] = {
    K_UP: ROWS,
    V_UP: ROWS,
    QKV_DOWN: REPLICATED,
    QKV_DOWN_NORM: REPLICATED,
    MLP_NORM_FUSED: REPLICATED,
    **dict.fromkeys(NORMS.values(), REPLICATED),
}
_LAYER = re.compile(r"(decoder\.layers\.\d+\.|mtp\.layers\.\d+\.transformer_layer\.)(.+)")


@dataclass(frozen=True, kw_only=True)
class MegatronLayout:
    """Which of the layouts a checkpoint has.

    Attributes:
        norms: ``"separate"`` or ``"fused"``.
        kv_up: ``"combined"`` or ``"split"``.
        down: ``"separate"`` or ``"fused"``.
    """

    norms: str = "separate"
    kv_up: str = "combined"
    down: str = "separate"

    @classmethod
    def recognise(cls, names: Iterable[str]) -> MegatronLayout:
        """Recognise the layout from the names of a checkpoint's tensors."""
        inner = {match[2] for match in map(_LAYER.fullmatch, names) if match}
        fused_norms = {*NORMS.values(), QKV_DOWN_NORM, MLP_NORM_FUSED}
        return cls(
            norms="fused" if inner & fused_norms else "separate",
            kv_up="split" if inner & {K_UP, V_UP} else "combined",
            down="fused" if QKV_DOWN in inner else "separate",
        )

    def describe(self) -> dict[str, object]:
        """For people: part -> layout."""
        return dict(asdict(self))


def canonical_tensors(
    tensors: Mapping[str, LazyTensor], layout: MegatronLayout, config: ModelConfig
) -> dict[str, LazyTensor]:
    """Bring whole tensors with numbered layers from a layout to the mapping's names.

    What does not belong to the layout stays as it is, for the mapping to refuse.

    Raises:
        CheckpointError: Listing tensors that are there in two layouts, or whose shape cannot be
            split.
    """
    problems: list[str] = []
    result = {}
    for layer, inner in _by_layer(tensors).items():
        _unfuse_norms(inner, layer, problems)
        _split_down(inner, layer, config, problems)
        _combine_kv_up(inner, layer, config, problems)
        result.update({layer + name: tensor for name, tensor in inner.items()})
    if problems:
        raise CheckpointError("The Megatron tensors do not fit any layout:", problems)
    return result


def laid_out_tensors(
    tensors: Mapping[str, LazyTensor], layout: MegatronLayout, config: ModelConfig
) -> dict[str, LazyTensor]:
    """The inverse of :func:`canonical_tensors`.

    Raises:
        CheckpointError: If the model has no such layout.
    """
    if layout.down == "fused" and config.q_lora_rank is None:
        raise CheckpointError(
            "--down fused needs a model with a q_lora_rank; this one projects the query directly"
        )
    result = {}
    for layer, inner in _by_layer(tensors).items():
        if layout.kv_up == "split" and KV_UP in inner:
            inner = _with_split_kv_up(inner, config)
        if layout.down == "fused" and Q_DOWN in inner:
            inner = _with_fused_down(inner)
        if layout.norms == "fused":
            inner = {_fused_norm(name, inner): tensor for name, tensor in inner.items()}
        result.update({layer + name: tensor for name, tensor in inner.items()})
    return result


def _by_layer(tensors: Mapping[str, LazyTensor]) -> dict[str, dict[str, LazyTensor]]:
    """Tensors by the prefix of their layer, ``""`` for those of none; order is kept."""
    groups: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        layer, inner = (match[1], match[2]) if match else ("", name)
        groups.setdefault(layer, {})[inner] = tensor
    return groups


def _unfuse_norms(inner: dict[str, LazyTensor], layer: str, problems: list[str]) -> None:
    for separate, fused in (
        *NORMS.items(),
        (MLP_NORM, MLP_NORM_FUSED),
        (INPUT_NORM, QKV_DOWN_NORM),
    ):
        if fused not in inner:
            continue
        if separate in inner:
            problems.append(f"{layer}{separate} and {layer}{fused} are one norm, stored twice")
        inner[separate] = inner.pop(fused)


def _split_down(
    inner: dict[str, LazyTensor], layer: str, config: ModelConfig, problems: list[str]
) -> None:
    if QKV_DOWN not in inner:
        return
    fused = inner.pop(QKV_DOWN)
    rows = [config.q_lora_rank or 0, config.kv_lora_rank + config.qk_rope_head_dim]
    expected = (sum(rows), config.hidden_size)
    if fused.shape != expected:
        problems.append(f"{layer}{QKV_DOWN} has shape {fused.shape}; expected {expected}")
        return
    for name, part in zip((Q_DOWN, KV_DOWN), fused.split(rows)):
        if name in inner:
            problems.append(f"{layer}{name} and {layer}{QKV_DOWN} are one weight, stored twice")
        inner[name] = part


def _combine_kv_up(
    inner: dict[str, LazyTensor], layer: str, config: ModelConfig, problems: list[str]
) -> None:
    parts = [inner.pop(name, None) for name in (K_UP, V_UP)]
    if parts == [None, None]:
        return
    if KV_UP in inner:
        problems.append(f"{layer}{KV_UP} and {layer}{K_UP} are one weight, stored twice")
    heads, rank = config.num_attention_heads, config.kv_lora_rank
    per_head = []
    for name, part, width in zip((K_UP, V_UP), parts, (config.qk_nope_head_dim, config.v_head_dim)):
        expected = (heads * width, rank)
        if part is None:
            problems.append(f"{layer}{name} is missing; expected shape {expected}")
        elif part.shape != expected:
            problems.append(f"{layer}{name} has shape {part.shape}; expected {expected}")
        else:
            per_head.append(part.view(heads, width, rank))
    if len(per_head) == 2 and per_head[0].dtype != per_head[1].dtype:
        problems.append(f"{layer}{K_UP} and {layer}{V_UP} differ in dtype")
    elif len(per_head) == 2:
        inner[KV_UP] = concat(per_head, dim=1).view(heads * _rows_per_head(config), rank)


def _with_split_kv_up(inner: dict[str, LazyTensor], config: ModelConfig) -> dict[str, LazyTensor]:
    heads, rank = config.num_attention_heads, config.kv_lora_rank
    widths = [config.qk_nope_head_dim, config.v_head_dim]
    k, v = inner[KV_UP].view(heads, _rows_per_head(config), rank).split(widths, dim=1)
    split = {K_UP: k.view(heads * widths[0], rank), V_UP: v.view(heads * widths[1], rank)}
    return _replaced(inner, KV_UP, split)


def _with_fused_down(inner: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    if inner[Q_DOWN].dtype != inner[KV_DOWN].dtype:
        raise CheckpointError(
            f"--down fused needs {Q_DOWN} and {KV_DOWN} in one dtype; got "
            f"{inner[Q_DOWN].dtype} and {inner[KV_DOWN].dtype}"
        )
    fused = {QKV_DOWN: concat([inner[Q_DOWN], inner[KV_DOWN]])}
    return _replaced({k: v for k, v in inner.items() if k != KV_DOWN}, Q_DOWN, fused)


def _fused_norm(name: str, inner: Mapping[str, LazyTensor]) -> str:
    if name == MLP_NORM and "mlp.linear_fc1.weight" in inner:
        return MLP_NORM_FUSED
    if name == INPUT_NORM and QKV_DOWN in inner:
        return QKV_DOWN_NORM
    return NORMS.get(name, name)


def _replaced(
    inner: Mapping[str, LazyTensor], old: str, new: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    result: dict[str, LazyTensor] = {}
    for name, tensor in inner.items():
        result.update(new if name == old else {name: tensor})
    return result


def _rows_per_head(config: ModelConfig) -> int:
    return config.qk_nope_head_dim + config.v_head_dim
