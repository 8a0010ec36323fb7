"""State dicts of one tensor-parallel rank: every layout Megatron's MLA writes, to ours and back.

| part | standard layouts | ours |
|---|---|---|
| K, V up-projection | ``linear_kv_up_proj.weight``, per head rows [K; V]; or split | split |
| latent norms | ``q_layernorm.*``; or fused, ``linear_q_up_proj.layer_norm_*`` | separate |
| down-projections | separate; or fused, ``linear_qkv_down_proj``, rows [Q; KV] | separate |
| ``_extra_state`` | one per linear layer | one per layer that keeps one |

Only values move; no tensor is rounded or transposed, so both directions are exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from absorbed_mla.dims import MLADims

COMBINED_KV_UP = "linear_kv_up_proj.weight"
FUSED_DOWN = "linear_qkv_down_proj.weight"
FUSED_INPUT_NORM = "linear_qkv_down_proj.layer_norm_weight"
# Our name -> the name under which TransformerEngine's fused norm + linear layers keep it.
FUSED_NORMS = {
    "q_layernorm.weight": "linear_q_up_proj.layer_norm_weight",
    "kv_layernorm.weight": "linear_kv_up_proj.layer_norm_weight",
}
EXTRA_STATE = "._extra_state"


@dataclass(frozen=True)
class StandardLayout:
    """Which of Megatron's layouts a state dict has.

    Attributes:
        kv_up: ``"combined"`` or ``"split"``.
        norms: ``"fused"``, ``"separate"`` or ``"none"``.
        down: ``"fused"`` or ``"separate"``.
    """

    kv_up: str
    norms: str
    down: str

    @classmethod
    def recognise(cls, keys: Iterable[str]) -> StandardLayout:
        """Recognise the layout from an attention's keys, without prefix."""
        keys = set(keys)
        norms = "none"
        if keys & set(FUSED_NORMS):
            norms = "separate"
        if keys & set(FUSED_NORMS.values()):
            norms = "fused"
        return cls(
            kv_up="combined" if COMBINED_KV_UP in keys else "split",
            norms=norms,
            down="fused" if FUSED_DOWN in keys else "separate",
        )

    def __str__(self) -> str:
        return f"K/V up-projection {self.kv_up}, norms {self.norms}, down-projections {self.down}"


def split_kv_up(weight: Tensor, dims: MLADims) -> tuple[Tensor, Tensor]:
    """Split a combined K/V up-projection into W_UK [N * nope, C] and W_UV [N * v, C].

    Args:
        weight: [N * (nope + v), C], the rows of each head together: first K, then V.
    """
    heads = weight.view(dims.num_heads_per_rank, dims.qk_nope_head_dim + dims.v_head_dim, -1)
    w_uk, w_uv = heads.split([dims.qk_nope_head_dim, dims.v_head_dim], dim=1)
    return w_uk.flatten(0, 1), w_uv.flatten(0, 1)


def combine_kv_up(w_uk: Tensor, w_uv: Tensor, dims: MLADims) -> Tensor:
    """The inverse of :func:`split_kv_up`."""
    heads = (dims.num_heads_per_rank, -1, w_uk.shape[-1])
    return torch.cat((w_uk.view(heads), w_uv.view(heads)), dim=1).flatten(0, 1)


def to_absorbed_state_dict(state_dict: dict, dims: MLADims, prefix: str | None = None) -> dict:
    """Bring the MLA layers of a state dict into this package's layout.

    Args:
        state_dict: Of an attention, a layer or a whole model, in any layout of the table above.
        dims: Dimensions on the rank that the state dict belongs to.
        prefix: Of one attention, e.g. ``"decoder.layers.0.self_attention."``; None finds them all.

    Returns:
        A new dict; tensors are shared where they did not change.

    Raises:
        ValueError: If a tensor has an unexpected shape, naming key, shapes and layout.
    """
    result = dict(state_dict)
    for start in find_attentions(state_dict) if prefix is None else [prefix]:
        _absorb_one(result, dims, start)
    return result


def to_standard_state_dict(
    state_dict: dict,
    dims: MLADims,
    *,
    norms: str = "separate",
    down: str = "separate",
    prefix: str | None = None,
) -> dict:
    """Write the MLA layers of a state dict in one of Megatron's standard layouts.

    Args:
        state_dict: In this package's layout.
        dims: Dimensions on the rank that the state dict belongs to.
        norms: ``"separate"`` (local spec) or ``"fused"`` (TransformerEngine's).
        down: ``"separate"`` or ``"fused"`` (``mla_down_proj_fusion``).
        prefix: Of one attention; None finds them all.

    Raises:
        ValueError: If ``norms`` or ``down`` is unknown, or a tensor has an unexpected shape.
    """
    for option, value, accepted in (
        ("norms", norms, ("separate", "fused")),
        ("down", down, ("separate", "fused")),
    ):
        if value not in accepted:
            raise ValueError(f"{option} must be one of {', '.join(accepted)}; got {value!r}")
    result = dict(state_dict)
    for start in find_attentions(state_dict) if prefix is None else [prefix]:
        _standardise_one(result, dims, start, norms, down)
    return result


def find_attentions(keys: Iterable[str]) -> list[str]:
    """Prefixes of the MLA layers among the keys of a state dict."""
    marks = ("linear_kv_down_proj.weight", FUSED_DOWN)
    return sorted({key.removesuffix(m) for key in keys for m in marks if key.endswith(m)})


def _absorb_one(state: dict, dims: MLADims, prefix: str) -> None:
    names = [key[len(prefix) :] for key in state if key.startswith(prefix)]
    layout = StandardLayout.recognise(names)
    _refuse_two_versions(names, layout, prefix)
    if layout.kv_up == "combined":
        combined = state.pop(prefix + COMBINED_KV_UP)
        rows = dims.num_heads_per_rank * (dims.qk_nope_head_dim + dims.v_head_dim)
        _check_shape(prefix + COMBINED_KV_UP, combined, (rows, dims.kv_lora_rank), layout)
        w_uk, w_uv = split_kv_up(combined, dims)
        state[f"{prefix}linear_k_up_proj.weight"] = w_uk
        state[f"{prefix}linear_v_up_proj.weight"] = w_uv
    if layout.down == "fused":
        _split_fused_down(state, dims, prefix, layout)
    for ours, fused in FUSED_NORMS.items():
        if prefix + fused in state:
            state[prefix + ours] = state.pop(prefix + fused)
    up = ("linear_kv_up_proj", "linear_k_up_proj", "linear_v_up_proj")
    for module in (*up, "linear_qkv_down_proj", "core_attention"):
        state.pop(prefix + module + EXTRA_STATE, None)


def _refuse_two_versions(names: list[str], layout: StandardLayout, prefix: str) -> None:
    """Of two layouts of one weight, which is meant cannot be known."""
    separate_names = {
        COMBINED_KV_UP: ["linear_k_up_proj.weight", "linear_v_up_proj.weight"],
        FUSED_DOWN: ["linear_q_down_proj.weight", "linear_kv_down_proj.weight"],
        **{fused: [separate] for separate, fused in FUSED_NORMS.items()},
    }
    for standard, separate in separate_names.items():
        both = [name for name in separate if standard in names and name in names]
        if both:
            raise ValueError(
                f"{prefix}{both[0]} and {prefix}{standard} hold the same weight twice; keep one "
                f"(recognised layout: {layout})"
            )


def _split_fused_down(state: dict, dims: MLADims, prefix: str, layout: StandardLayout) -> None:
    fused = state.pop(prefix + FUSED_DOWN)
    widths = [dims.q_lora_rank or 0, dims.kv_down_dim]
    shards = sum(widths) // fused.shape[0] if fused.shape[0] else 0
    if not shards or any(w % shards for w in widths) or fused.shape[0] * shards != sum(widths):
        _check_shape(prefix + FUSED_DOWN, fused, (sum(widths), dims.hidden_size), layout)
    q_down, kv_down = fused.split([w // shards for w in widths])
    state[f"{prefix}linear_q_down_proj.weight"] = q_down
    state[f"{prefix}linear_kv_down_proj.weight"] = kv_down
    if prefix + FUSED_INPUT_NORM in state:
        # The norm before the attention, fused into its first layer, is the enclosing layer's.
        parent = prefix.removesuffix("self_attention.")
        if parent == prefix:
            raise input_norm_error(prefix)
        state[f"{parent}input_layernorm.weight"] = state.pop(prefix + FUSED_INPUT_NORM)


def input_norm_error(prefix: str) -> ValueError:
    """What to say where only the enclosing layer could take the norm that is fused in."""
    return ValueError(
        f"{prefix}{FUSED_INPUT_NORM} is the enclosing layer's input_layernorm.weight, which an "
        "attention cannot load: convert the state dict of the layer or model with "
        "to_absorbed_state_dict first"
    )


def _standardise_one(state: dict, dims: MLADims, prefix: str, norms: str, down: str) -> None:
    kv_up = []
    for name, width in (("k", dims.qk_nope_head_dim), ("v", dims.v_head_dim)):
        key = f"{prefix}linear_{name}_up_proj.weight"
        expected = (dims.num_heads_per_rank * width, dims.kv_lora_rank)
        if key not in state:
            raise ValueError(f"{key} of shape {expected} is missing from the state dict")
        kv_up.append(state.pop(key))
        _check_shape(key, kv_up[-1], expected, "this package's")
    state[prefix + COMBINED_KV_UP] = combine_kv_up(kv_up[0], kv_up[1], dims)
    state[f"{prefix}linear_kv_up_proj{EXTRA_STATE}"] = None
    if norms == "fused":
        for ours, fused in FUSED_NORMS.items():
            if prefix + ours in state:
                state[prefix + fused] = state.pop(prefix + ours)
    if down == "fused":
        if dims.q_lora_rank is None:
            raise ValueError("down='fused' needs a q_lora_rank: there is no query down-projection")
        parts = [state.pop(f"{prefix}linear_{name}_down_proj.weight") for name in ("q", "kv")]
        state[prefix + FUSED_DOWN] = torch.cat(parts)
        for name in ("q", "kv"):
            state.pop(f"{prefix}linear_{name}_down_proj{EXTRA_STATE}", None)


def _check_shape(key: str, tensor: Tensor, expected: tuple[int, ...], layout: object) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(
            f"{key} has shape {tuple(tensor.shape)}, this model needs {expected} "
            f"(recognised layout: {layout})"
        )
