"""Compare the model of a checkpoint with that of the command line, before one is built."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping

from megatron.core import dist_checkpointing

from training import distributed
from training.checkpoint_args import preset_from_args
from training.model_options import flag_of
from training.presets import ModelPreset
from training.start import Start

# Fields of a preset that decide the shapes of weights.
_SHAPES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "vocab_size",
    "num_moe_experts",
)
_SHAPES_OF_MOE = (
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_enable_expert_bias",
)
# Fields that decide what the same weights compute.
_FUNCTION = ("layernorm_epsilon", "latent_norm_eps", "rope_type", "rotary_base")
_FUNCTION_OF_YARN = (
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
_FUNCTION_OF_MOE = (
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
)
# What Megatron takes None for.
_MEANT = {"moe_router_topk_scaling_factor": 1.0}
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_HEADS = "--num-attention-heads"
_KEYS = f"{_HEADS} x (--qk-head-dim + --qk-pos-emb-head-dim)"
_VALUES = f"{_HEADS} x (--qk-head-dim + --v-head-dim)"


def require_same_model(
    args: argparse.Namespace, start: Start, model: ModelPreset, script: str
) -> None:
    """Refuse a checkpoint whose weights have other shapes than the model on the command line.

    The checkpoint's model is read from the arguments that it carries or, without them, from the
    shapes of its tensors. Options that change what the same weights compute, such as the rotary
    base, may be intended; rank 0 prints a warning.

    Args:
        args: The command line.
        start: The checkpoint.
        model: The one of the command line, with the padded vocabulary.
        script: Name of the program, for the warning.

    Raises:
        ValueError: Naming all options that differ, in one line.
    """
    if args.use_checkpoint_args:
        return
    there = _described(start)
    if there is None:
        saved = dist_checkpointing.load_tensors_metadata(str(start.path))
        shapes = {name: tuple(tensor.global_shape) for name, tensor in saved.items()}
        problems, warnings = _differences(sizes_of_tensors(shapes), sizes_of_model(model)), []
    else:
        moe = there.num_moe_experts and model.num_moe_experts
        yarn = "yarn" in (there.rope_type, model.rope_type)
        shape = _SHAPES + (_SHAPES_OF_MOE if moe else ())
        function = _FUNCTION + _FUNCTION_OF_MOE * bool(moe) + _FUNCTION_OF_YARN * yarn
        problems, warnings = (
            _differences(_fields(there, names), _fields(model, names))
            for names in (shape, function)
        )
    if problems:
        own = "" if there is None else "; without --preset the model is the checkpoint's own"
        if there is not None and script != "generate.py":
            own = "; --use-checkpoint-args takes the checkpoint's own"
        raise ValueError(
            f"--load: {start.path} does not hold the model asked for "
            f"(--preset {args.preset}): {'; '.join(problems)}{own}"
        )
    if warnings and not distributed.rank():
        text = f"{script}: warning: the model in {start.path} has other options: "
        print(text + "; ".join(warnings), file=sys.stderr, flush=True)


def _described(start: Start) -> ModelPreset | None:
    try:
        return None if start.args is None else preset_from_args(start.args)
    except ValueError:
        # Another kind of model, whose tensors may fit all the same.
        return None


def _fields(model: ModelPreset, names: tuple[str, ...]) -> dict[str, object]:
    """Values of fields, by option."""
    found = {}
    for name in names:
        value = getattr(model, name)
        found[flag_of(name)] = _MEANT.get(name) if value is None else value
    return found


def _differences(there: Mapping[str, object], here: Mapping[str, object]) -> list[str]:
    return [
        f"{name} {_shown(there[name])} there, {_shown(value)} asked for"
        for name, value in here.items()
        if name in there and there[name] != value
    ]


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        # moe_layer_freq.
        return f"{value.count(0)} dense and {value.count(1)} MoE layers" if value else "no layers"
    return "none" if value is None else str(value)


def sizes_of_model(model: ModelPreset) -> dict[str, object]:
    """What :func:`sizes_of_tensors` returns for a complete checkpoint of ``model``."""
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
    """Sizes of a model by option, as far as the shapes of its tensors show them.

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
    """The number of layers, and the shape of each kind of tensor in the first layer that has it."""
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
