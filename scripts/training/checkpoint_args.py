"""The model of a checkpoint, from the arguments (``args``) in it."""

from __future__ import annotations

import argparse

from checkpoint_conversion.config_fields import Fields
from checkpoint_conversion.indexer import has_indexer_args
from checkpoint_conversion.megatron_args import (
    check_kind,
    moe_layers,
    parse_moe_layer_freq,
    read_norm_epsilon,
    read_rotary_args,
)
from checkpoint_conversion.routing import ROUTER_OPTIONS
from training.presets import COMMON, Model

_MOST = 2**31
_REQUIRED = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_lora_rank"),
    *("qk_head_dim", "v_head_dim", "max_position_embeddings"),
)
_SIZES = ("n_heads", "head_dim", "topk")
# Switches of sparse attention, and the values of Megatron's config where they are missing.
_SWITCHES = {"rope_interleaved": False, "rotate_activation": True, "scoring_relu": True}


def model_from_args(saved: argparse.Namespace) -> Model:
    """The model that a checkpoint's arguments describe, with the padded vocabulary.

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
    model = {
        **COMMON,
        **sizes,
        **vars(read_rotary_args(fields)),
        "vocab_size": fields.integer(padded, _MOST),
        "q_lora_rank": fields.integer_or_null("q_lora_rank", _MOST),
        "qk_pos_emb_head_dim": fields.integer("qk_pos_emb_head_dim", _MOST, least=0),
        "layernorm_epsilon": epsilon,
        # Models trained by Megatron have one epsilon for all norms.
        "latent_norm_epsilon": fields.number("latent_norm_epsilon", 1e-12, 1.0, default=epsilon),
        **_experts(fields),
        **_sparse(fields),
    }
    fields.raise_problems("--load: this script cannot train the checkpoint's model:")
    return model


def _experts(fields: Fields) -> dict:
    if not fields.given("num_experts"):
        return {"moe_layer_freq": 1}
    scores = fields.choice("moe_router_score_function", ("softmax", "sigmoid"), "softmax")
    pre_softmax = fields.boolean("moe_router_pre_softmax", default=False)
    if scores == "softmax" and not pre_softmax:
        fields.wrong("moe_router_pre_softmax", "true with softmax scores")
    # Megatron ignores the number of groups if the number of chosen groups is missing.
    groups = ("moe_router_num_groups", "moe_router_group_topk")
    limited = fields.given(groups[1])
    scale = "moe_router_topk_scaling_factor"
    return {
        "num_experts": fields.integer("num_experts", _MOST),
        "moe_layer_freq": _layers(fields),
        "moe_ffn_hidden_size": fields.integer("moe_ffn_hidden_size", _MOST),
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
    sizes = {name: fields.integer(f"dsa_indexer_{name}", _MOST) for name in _SIZES}
    switches = {n: fields.boolean(f"dsa_indexer_{n}", usual) for n, usual in _SWITCHES.items()}
    epsilon, offset = "dsa_indexer_k_norm_epsilon", "dsa_indexer_skip_topk_offset"
    return {
        "experimental_attention_variant": "dsa",
        **{f"dsa_indexer_{name}": value for name, value in (sizes | switches).items()},
        "dsa_indexer_topk_freq": fields.integer("dsa_indexer_topk_freq", _MOST, default=1),
        # 0 means the same as 1.
        offset: fields.integer(offset, _MOST, least=0, default=1) or 1,
        epsilon: fields.number(epsilon, 1e-12, 1.0) if fields.given(epsilon) else None,
    }


def _optional(fields: Fields, name: str, required: bool = False) -> int | None:
    return fields.integer(name, _MOST) if required or fields.given(name) else None


def _layers(fields: Fields) -> list[int]:
    freq = fields.raw("moe_layer_freq") if fields.given("moe_layer_freq") else 1
    layers = fields.raw("num_layers")
    if not isinstance(layers, int):
        return []
    try:
        return list(moe_layers(parse_moe_layer_freq(freq), layers))
    except ValueError as error:
        fields.problems.append(str(error))
        return []
