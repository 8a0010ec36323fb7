"""Preset, scaling and single sizes from the command line, put together to one model."""

from __future__ import annotations

import argparse

from checkpoint_conversion.moe_pattern import moe_layers, parse_moe_layer_freq
from training.arguments import name_of
from training.presets import ModelPreset, get_preset, scale_down

# Option: field of the preset, where the names differ.
_RENAMED = {"norm_epsilon": "layernorm_epsilon", "latent_norm_epsilon": "latent_norm_eps"}
_SAME_NAME = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "max_position_embeddings",
    "rope_type",
    "rotary_base",
    "rotary_scaling_factor",
    "mscale",
    "mscale_all_dim",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_aux_loss_coeff",
)
_OVERRIDES = {**{name: name for name in _SAME_NAME}, **_RENAMED}
# Options for which 0 means that the model has no such part.
_ZERO_IS_NONE = {
    "q_lora_rank": "q_lora_rank",
    "num_experts": "num_moe_experts",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}


def resolve_model(args: argparse.Namespace) -> ModelPreset:
    """The model that the command line describes; its vocabulary is not the tokenizer's yet.

    Raises:
        ValueError: If a size is not positive or sizes do not fit each other.
    """
    if args.use_checkpoint_args:
        return _checkpoint_model(args)
    model = scale_down(get_preset(args.preset), args.scale_down)
    layers_before = model.num_layers
    changes = _overrides(args)
    for option, field in _ZERO_IS_NONE.items():
        value = getattr(args, option)
        if value is not None:
            changes[field] = value or None
    _require_positive(changes)
    model = model.replace(**changes)
    model = model.replace(moe_layer_freq=_moe_layer_freq(args, model, layers_before))
    return _checked_moe(args, model)


def _checkpoint_model(args: argparse.Namespace) -> ModelPreset:
    # Only here: Megatron takes seconds to import, and other command lines do without.
    from training.checkpoint_args import preset_from_args
    from training.start import load_model_args

    model = preset_from_args(load_model_args(args.load))
    # The embedding has the checkpoint's rows, whatever the tokenizer needs.
    args.vocab_size = args.make_vocab_size_divisible_by = model.vocab_size
    changes = _overrides(args)
    _require_positive(changes)
    return _checked_moe(args, model.replace(**changes))


def _overrides(args: argparse.Namespace) -> dict:
    return {
        field: getattr(args, option)
        for option, field in _OVERRIDES.items()
        if getattr(args, option) is not None
    }


def _moe_layer_freq(
    args: argparse.Namespace, model: ModelPreset, layers_before: int
) -> tuple[int, ...]:
    if not model.num_moe_experts:
        if args.moe_layer_freq is not None and args.num_experts is None:
            raise ValueError(f"--moe-layer-freq {args.moe_layer_freq} needs --num-experts")
        return ()
    if args.moe_layer_freq is not None:
        return moe_layers(parse_moe_layer_freq(args.moe_layer_freq), model.num_layers)
    if model.num_layers == layers_before:
        return model.moe_layer_freq
    dense = min(model.moe_layer_freq.count(0), model.num_layers)
    return (0,) * dense + (1,) * (model.num_layers - dense)


def _checked_moe(args: argparse.Namespace, model: ModelPreset) -> ModelPreset:
    if not any(model.moe_layer_freq):
        return model.replace(num_moe_experts=None, moe_layer_freq=())
    if model.moe_router_topk > model.num_moe_experts:
        raise ValueError(
            f"{name_of(args, '--moe-router-topk')} must be at most "
            f"{name_of(args, '--num-experts')}, {model.num_moe_experts}, "
            f"got {model.moe_router_topk}"
        )
    groups = model.moe_router_num_groups
    if groups and model.num_moe_experts % groups:
        raise ValueError(
            f"{name_of(args, '--num-experts')} must be divisible by its {groups} routing groups, "
            f"got {model.num_moe_experts}"
        )
    return model


def _require_positive(changes: dict) -> None:
    may_be_zero = {"qk_pos_emb_head_dim", "moe_aux_loss_coeff", "mscale", "mscale_all_dim"}
    flags = {field: option for option, field in (_OVERRIDES | _ZERO_IS_NONE).items()}
    for field, value in changes.items():
        if isinstance(value, str) or value is None:
            continue
        if value < 0 or (value == 0 and field not in may_be_zero):
            flag = "--" + flags[field].replace("_", "-")
            least = "at least 0" if field in may_be_zero else "above 0"
            raise ValueError(f"{flag} must be {least}, got {value}")
    if changes.get("qk_pos_emb_head_dim", 0) % 2:
        raise ValueError(
            f"--qk-pos-emb-head-dim must be even, got {changes['qk_pos_emb_head_dim']}"
        )


def padded_vocab_size(args: argparse.Namespace, model: ModelPreset, tokenizer_size: int) -> int:
    """Rows of the embedding.

    ``--vocab-size`` if given; the preset's for a released model at its real size; else what the
    tokenizer needs. Padding does not depend on the tensor-parallel size, so that checkpoints fit
    every one.

    Raises:
        ValueError: If the vocabulary is smaller than the tokenizer's.
    """
    size = args.vocab_size
    if size is None:
        real = args.preset != "tiny" and args.scale_down == 1
        size = model.vocab_size if real else tokenizer_size
    if size < tokenizer_size:
        raise ValueError(
            f"{name_of(args, '--vocab-size')} must be at least the tokenizer's {tokenizer_size}, "
            f"got {size}"
        )
    multiple = args.make_vocab_size_divisible_by
    return -(-size // multiple) * multiple


def is_padded(args: argparse.Namespace) -> bool:
    """Whether documents are padded, to be cut."""
    return args.packed and args.context_parallel_size > 1


def transformer_impl(args: argparse.Namespace, device_type: str) -> str:
    """``--transformer-impl``, or its default on this machine."""
    if args.transformer_impl is not None:
        return args.transformer_impl
    if device_type != "cuda":
        return "local"
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return "transformer_engine" if HAVE_TE else "local"


def token_dispatcher(args: argparse.Namespace, device_type: str) -> str:
    """``--moe-token-dispatcher-type``, or its default on this machine."""
    if args.moe_token_dispatcher_type is not None:
        return args.moe_token_dispatcher_type
    return "alltoall" if device_type == "cuda" else "allgather"
