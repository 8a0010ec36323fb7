"""The model of a checkpoint, as the arguments (``args``) in Megatron's checkpoints."""

from __future__ import annotations

import argparse
import dataclasses

from checkpoint_conversion.config_fields import Fields
from checkpoint_conversion.indexer import has_indexer_args
from checkpoint_conversion.megatron_args import (
    COMMON_ARGS,
    check_kind,
    moe_layers,
    parse_moe_layer_freq,
    read_norm_epsilon,
    read_rotary_args,
)
from checkpoint_conversion.routing import ROUTER_OPTIONS
from training.model import params_dtype
from training.presets import ModelPreset

_MOST = 2**31
_REQUIRED = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_head_dim",
    "v_head_dim",
    "max_position_embeddings",
)
_PARALLEL = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)


def checkpoint_args(
    args: argparse.Namespace, preset: ModelPreset, vocab_size: int
) -> argparse.Namespace:
    """The arguments to save in a checkpoint, under Megatron's names.

    Args:
        args: The command line.
        preset: The model, with the padded vocabulary.
        vocab_size: The vocabulary without padding.
    """
    fields = dataclasses.asdict(preset)
    experts = fields.pop("num_moe_experts")
    latent_norm_epsilon = fields.pop("latent_norm_eps")
    fields["moe_layer_freq"] = list(preset.moe_layer_freq) or 1
    return argparse.Namespace(
        **{
            **COMMON_ARGS,
            **fields,
            "num_experts": experts,
            "moe_router_pre_softmax": True,
            "norm_epsilon": preset.layernorm_epsilon,
            "latent_norm_epsilon": latent_norm_epsilon,
            **_vocabulary(args, preset.vocab_size, vocab_size),
            "untie_embeddings_and_output_weights": True,
            "mtp_num_layers": None,
            "attention_dropout": args.attention_dropout,
            "hidden_dropout": args.hidden_dropout,
            "params_dtype": params_dtype(args),
            "bf16": args.bf16,
            "fp16": args.fp16,
            **{name: getattr(args, name) for name in _PARALLEL},
        }
    )


def _vocabulary(args: argparse.Namespace, rows: int, vocab_size: int) -> dict[str, int | None]:
    """What says which rows of the embedding may be padding, which the conversion drops.

    As in Megatron's own arguments, ``vocab_size`` is None where a tokenizer's was padded.
    """
    found = {
        "vocab_size": vocab_size if vocab_size == rows else None,
        "make_vocab_size_divisible_by": args.make_vocab_size_divisible_by,
    }
    return found | getattr(args, "loaded_vocabulary", {}) | {"padded_vocab_size": rows}


def preset_from_args(saved: argparse.Namespace) -> ModelPreset:
    """The model that a checkpoint's arguments describe.

    Raises:
        ValueError: Listing everything that is missing, wrong, or not supported by this script.
    """
    values = dict(vars(saved))
    # Megatron saves a list, one coefficient for each kind of balancing loss.
    match values.get("moe_aux_loss_coeff"):
        case [coefficient]:
            values["moe_aux_loss_coeff"] = coefficient
    fields = Fields(values, [], "args.")
    check_kind(fields)
    if not fields.boolean("untie_embeddings_and_output_weights", default=False):
        fields.wrong("untie_embeddings_and_output_weights", "true")
    if fields.given("mtp_num_layers") and not fields.equals("mtp_num_layers", 0):
        fields.wrong(
            "mtp_num_layers", "0 (--exclude-mtp of the conversion leaves those layers out)"
        )
    epsilon = read_norm_epsilon(fields)
    padded = "padded_vocab_size" if fields.given("padded_vocab_size") else "vocab_size"
    sizes = {name: fields.integer(name, _MOST) for name in _REQUIRED}
    preset = ModelPreset(
        **sizes,
        **vars(read_rotary_args(fields)),
        vocab_size=fields.integer(padded, _MOST),
        q_lora_rank=fields.integer_or_null("q_lora_rank", _MOST),
        qk_pos_emb_head_dim=fields.integer("qk_pos_emb_head_dim", _MOST, least=0),
        layernorm_epsilon=epsilon,
        # Models trained by Megatron have one epsilon for all norms.
        latent_norm_eps=fields.number("latent_norm_epsilon", 1e-12, 1.0, default=epsilon),
        **_experts(fields),
        **_sparse(fields),
    )
    fields.raise_problems("--load: this script cannot train the checkpoint's model:")
    return preset


def _experts(fields: Fields) -> dict:
    has_experts = fields.given("num_experts")
    scores = fields.choice("moe_router_score_function", ("softmax", "sigmoid"), "softmax")
    pre_softmax = fields.boolean("moe_router_pre_softmax", default=False)
    if has_experts and scores == "softmax" and not pre_softmax:
        fields.wrong("moe_router_pre_softmax", "true with softmax scores")
    # Megatron ignores the number of groups if the number of chosen groups is missing.
    groups = ("moe_router_num_groups", "moe_router_group_topk")
    limited = fields.given(groups[1])
    scale = "moe_router_topk_scaling_factor"
    return {
        "num_moe_experts": _optional(fields, "num_experts"),
        "moe_layer_freq": _layers(fields) if has_experts else (),
        "moe_ffn_hidden_size": _optional(fields, "moe_ffn_hidden_size", required=has_experts),
        "moe_shared_expert_intermediate_size": _optional(
            fields, "moe_shared_expert_intermediate_size"
        ),
        "moe_router_topk": fields.integer("moe_router_topk", _MOST, default=2),
        "moe_router_score_function": scores,
        "moe_router_enable_expert_bias": fields.boolean(
            "moe_router_enable_expert_bias", default=False
        ),
        scale: fields.number(scale, 1e-6, 1e6) if fields.given(scale) else None,
        **{name: _optional(fields, name, required=limited) for name in groups if limited},
        **_router_options(fields, 1 if scores == "softmax" else 2),
        "moe_aux_loss_coeff": fields.number("moe_aux_loss_coeff", 0.0, 1e6, default=1e-4),
    }


def _router_options(fields: Fields, best: int) -> dict:
    """Options of the layers' router; None for Megatron's choice.

    Args:
        fields: Of the arguments.
        best: Experts of a group that rank it in models with these scores.
    """
    group_score, normalised = ROUTER_OPTIONS
    found = {
        group_score: _optional(fields, group_score),
        normalised: fields.boolean(normalised, False) if fields.given(normalised) else None,
    }
    groups = fields.raw("moe_router_group_topk")
    # Of an earlier release, which has this epsilon in its arguments but not those options. Its
    # converter wrote none, and its training chose as Megatron does.
    unsaid = fields.given("latent_norm_epsilon") and not fields.null(group_score)
    if unsaid and not fields.given(group_score) and isinstance(groups, int) and groups > 0:
        topk = fields.integer("moe_router_topk", _MOST, default=2)
        if topk // groups != best:
            fields.wrong(
                group_score,
                "None or an integer. An earlier release wrote this checkpoint, which ranked groups "
                f"by the best {topk // groups} of their experts where models like this one take "
                f"the best {best}. If it was not trained, convert the original again; if it was, "
                "convert it to absorbed with a copy of the model's config.json in --hf-config, in "
                f'which "{group_score}" is {topk // groups}',
            )
    return found


def _sparse(fields: Fields) -> dict:
    """Fields of sparse attention; what is missing has the default of Megatron's config."""
    if not has_indexer_args(fields):
        return {}
    needed = ("n_heads", "head_dim", "topk")
    epsilon = "dsa_indexer_k_norm_epsilon"
    return {
        "experimental_attention_variant": "dsa",
        **{f"dsa_indexer_{name}": fields.integer(f"dsa_indexer_{name}", _MOST) for name in needed},
        "dsa_indexer_topk_freq": fields.integer("dsa_indexer_topk_freq", _MOST, default=1),
        # 0 means the same as 1.
        "dsa_indexer_skip_topk_offset": fields.integer(
            "dsa_indexer_skip_topk_offset", _MOST, least=0, default=1
        )
        or 1,
        "dsa_indexer_rope_interleaved": fields.boolean("dsa_indexer_rope_interleaved", False),
        "dsa_indexer_rotate_activation": fields.boolean("dsa_indexer_rotate_activation", True),
        "dsa_indexer_scoring_relu": fields.boolean("dsa_indexer_scoring_relu", True),
        epsilon: fields.number(epsilon, 1e-12, 1.0) if fields.given(epsilon) else None,
    }


def _optional(fields: Fields, name: str, required: bool = False) -> int | None:
    return fields.integer(name, _MOST) if required or fields.given(name) else None


def _layers(fields: Fields) -> tuple[int, ...]:
    freq = fields.raw("moe_layer_freq") if fields.given("moe_layer_freq") else 1
    layers = fields.raw("num_layers")
    if not isinstance(layers, int):
        return ()
    try:
        return moe_layers(parse_moe_layer_freq(freq), layers)
    except ValueError as error:
        fields.problems.append(str(error))
        return ()
