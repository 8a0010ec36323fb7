"""Sizes of a model as the names and shapes of a checkpoint's tensors tell them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from training.presets import ModelPreset

_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_HEADS = "--num-attention-heads"
_KEYS = f"{_HEADS} x (--qk-head-dim + --qk-pos-emb-head-dim)"
_VALUES = f"{_HEADS} x (--qk-head-dim + --v-head-dim)"


def sizes_of_model(model: ModelPreset) -> dict[str, object]:
    """What :func:`sizes_of_tensors` finds in a checkpoint of ``model``, if it finds all."""
    heads = model.num_attention_heads
    sizes: dict[str, object] = {
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden_size,
        "the vocabulary": model.vocab_size,
        "--q-lora-rank": model.q_lora_rank,
        "--kv-lora-rank": model.kv_lora_rank,
        "--qk-pos-emb-head-dim": model.qk_pos_emb_head_dim,
        _KEYS: heads * (model.qk_head_dim + model.qk_pos_emb_head_dim),
        _VALUES: heads * (model.qk_head_dim + model.v_head_dim),
        f"{_HEADS} x --v-head-dim": heads * model.v_head_dim,
        "--num-experts": model.num_moe_experts,
    }
    if not all(model.moe_layer_freq or (0,)):
        sizes["--ffn-hidden-size"] = model.ffn_hidden_size
    if model.num_moe_experts:
        shared = model.moe_shared_expert_intermediate_size
        sizes["--moe-shared-expert-intermediate-size"] = shared
    return sizes


def sizes_of_tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    """Sizes by option, as far as the tensors tell.

    Args:
        shapes: By name, as a distributed checkpoint has them: layers numbered, or stacked along a
            first dimension.
    """
    sizes: dict[str, object] = {}
    if "embedding.word_embeddings.weight" in shapes:
        vocabulary, hidden = shapes["embedding.word_embeddings.weight"]
        sizes |= {"the vocabulary": vocabulary, "--hidden-size": hidden}
    layers, found = _by_layer(shapes)
    if layers:
        sizes |= {"--num-layers": layers, **_attention(found), **_mlps(found)}
    return sizes


def _by_layer(
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Number of layers, and the shapes of a layer's tensors, from the first that has them."""
    layers, found = 0, {}
    for name, shape in shapes.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            continue
        number, suffix = match.groups()
        layers = max(layers, shape[0] if number is None else int(number) + 1)
        found.setdefault(suffix, shape[1:] if number is None else shape)
    return layers, found


def _attention(found: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    sizes: dict[str, object] = {}

    def shape(name: str) -> tuple[int, ...] | None:
        return found.get(f"self_attention.{name}.weight")

    if direct := shape("linear_q_proj"):
        sizes |= {"--q-lora-rank": None, _KEYS: direct[0]}
    if up := shape("linear_q_up_proj"):
        sizes |= {"--q-lora-rank": up[1], _KEYS: up[0]}
    if up := shape("linear_kv_up_proj"):
        sizes |= {_VALUES: up[0], "--kv-lora-rank": up[1]}
        if down := shape("linear_kv_down_proj"):
            sizes["--qk-pos-emb-head-dim"] = down[0] - up[1]
    if output := shape("linear_proj"):
        sizes[f"{_HEADS} x --v-head-dim"] = output[1]
    return sizes


def _mlps(found: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    """Gate and up-projection of an MLP are one tensor, twice as high as the MLP is wide."""
    router = found.get("mlp.router.weight")
    sizes: dict[str, object] = {"--num-experts": router[0] if router else None}
    if dense := found.get("mlp.linear_fc1.weight"):
        sizes["--ffn-hidden-size"] = dense[0] // 2
    if router:
        shared = found.get("mlp.shared_experts.linear_fc1.weight")
        sizes["--moe-shared-expert-intermediate-size"] = shared[0] // 2 if shared else None
    return sizes
