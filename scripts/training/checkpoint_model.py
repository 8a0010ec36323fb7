"""Whether a checkpoint holds the model that the command line describes, before it is built."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from megatron.core import dist_checkpointing

from training import distributed
from training.checkpoint_args import preset_from_args
from training.checkpoint_sizes import sizes_of_model, sizes_of_tensors
from training.presets import ModelPreset
from training.start import Start, flag_of

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
# Megatron's value for a field that is None.
_MEANT = {"moe_router_topk_scaling_factor": 1.0}


def require_same_model(
    args: argparse.Namespace, start: Start, asked: ModelPreset, script: str
) -> None:
    """Compare a model with what a checkpoint says about its own, or else with its tensors.

    What the same weights would compute with other options, such as another rotary base, is a
    warning: it may be wanted. Its first process prints it.

    Args:
        args: The command line.
        start: The checkpoint.
        asked: The model that the command line describes, its vocabulary as the embedding has it.
        script: Name of the program, for the warning.

    Raises:
        ValueError: Naming all options whose weights would have another shape, in one line.
    """
    if args.use_checkpoint_args:
        return
    there = _described(start)
    if there is None:
        saved = dist_checkpointing.load_tensors_metadata(str(start.path))
        shapes = {name: tuple(tensor.global_shape) for name, tensor in saved.items()}
        problems, warnings = _differences(sizes_of_tensors(shapes), sizes_of_model(asked)), []
    else:
        moe = there.num_moe_experts and asked.num_moe_experts
        yarn = "yarn" in (there.rope_type, asked.rope_type)
        shape = _SHAPES + (_SHAPES_OF_MOE if moe else ())
        function = _FUNCTION + _FUNCTION_OF_MOE * bool(moe) + _FUNCTION_OF_YARN * yarn
        problems, warnings = (
            _differences(_fields(there, names), _fields(asked, names))
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
        # No model of these scripts. Its tensors may fit nevertheless.
        return None


def _fields(model: ModelPreset, names: tuple[str, ...]) -> dict[str, object]:
    """By option."""
    found = {}
    for name in names:
        value = getattr(model, name)
        found[flag_of(name)] = _MEANT.get(name) if value is None else value
    return found


def _differences(there: Mapping[str, object], asked: Mapping[str, object]) -> list[str]:
    return [
        f"{name} {_shown(there[name])} there, {_shown(value)} asked for"
        for name, value in asked.items()
        if name in there and there[name] != value
    ]


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        # Per layer; the numbers of layers say the rest.
        return f"{value.count(0)} dense and {value.count(1)} MoE layers" if value else "no layers"
    return "none" if value is None else str(value)
