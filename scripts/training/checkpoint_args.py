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
from training.presets import COMMON, INDEXER, Model

_MOST = 2**31
_REQUIRED = {
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_lora_rank"),
    *("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "max_position_embeddings"),
    *("moe_ffn_hidden_size", "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
}
_MAY_BE_ZERO = {"qk_pos_emb_head_dim", "dsa_indexer_skip_topk_offset"}
_NUMBERS = {"moe_router_topk_scaling_factor", "dsa_indexer_k_norm_epsilon"}
_SWITCHES = {ROUTER_OPTIONS[1]}
# Where a preset that says nothing has another value than Megatron's arguments.
_DEFAULTS = {"moe_router_enable_expert_bias": False}
_GROUPS = ("moe_router_num_groups", "moe_router_group_topk")


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
    for name, without in (("use_mup", False), ("rope_factors", None)):
        fields.only(name, without, "left out")
    untied = "untie_embeddings_and_output_weights"
    if not fields.boolean(untied, default=False):
        fields.wrong(untied, "true")
    if fields.given("mtp_num_layers") and not fields.equals("mtp_num_layers", 0):
        fields.wrong(
            "mtp_num_layers", "0 (--exclude-mtp of the conversion leaves those layers out)"
        )
    padded = "padded_vocab_size" if fields.given("padded_vocab_size") else "vocab_size"
    epsilon = read_norm_epsilon(fields)
    special: Model = {
        **vars(read_rotary_args(fields)),
        "vocab_size": fields.integer(padded, _MOST),
        "q_lora_rank": fields.integer_or_null("q_lora_rank", _MOST),
        "layernorm_epsilon": epsilon,
        # Models trained by Megatron have one epsilon for all norms.
        "latent_norm_epsilon": fields.number("latent_norm_epsilon", 1e-12, 1.0, default=epsilon),
    }
    if has_indexer_args(fields):
        special["experimental_attention_variant"] = "dsa"
    else:
        special |= {name: COMMON[name] for name in INDEXER}
    if fields.given("num_experts"):
        special |= _special_of_experts(fields)
    else:
        special |= {n: value for n, value in COMMON.items() if n.startswith("moe_")}
        special |= {"num_experts": None, "moe_layer_freq": 1}
    model = {name: special[name] if name in special else _read(fields, name) for name in COMMON}
    # 0 means the same as 1.
    model["dsa_indexer_skip_topk_offset"] = model["dsa_indexer_skip_topk_offset"] or 1
    fields.raise_problems("--load: this script cannot train the checkpoint's model:")
    return model


def _read(fields: Fields, name: str) -> object:
    """An argument of the kind that its default has; most are integers."""
    usual = _DEFAULTS.get(name, COMMON[name])
    if name not in _REQUIRED and not fields.given(name):
        return usual
    if isinstance(usual, bool) or name in _SWITCHES:
        return fields.boolean(name, False)
    if isinstance(usual, float) or name in _NUMBERS:
        return fields.number(name, 0.0 if isinstance(usual, float) else 1e-12, 1e6)
    return fields.integer(name, _MOST, least=0 if name in _MAY_BE_ZERO else 1)


def _special_of_experts(fields: Fields) -> Model:
    scores = fields.choice("moe_router_score_function", ("softmax", "sigmoid"), "softmax")
    # Megatron ignores the number of groups if the number of chosen groups is missing.
    limited = fields.given(_GROUPS[1])
    group_score, normalised = ROUTER_OPTIONS
    pre_softmax = fields.boolean("moe_router_pre_softmax", default=False)
    of_chosen = scores == "softmax" and not pre_softmax
    if of_chosen and (limited or fields.given(normalised)):
        fields.wrong(
            "moe_router_pre_softmax", f"true with softmax scores and groups or {normalised}"
        )
    # Of an earlier release, which has this epsilon in its arguments but not our router's options.
    # Its converter wrote none, and its training chose as Megatron does.
    unsaid = fields.given("latent_norm_epsilon") and not fields.null(group_score)
    if unsaid and limited and not fields.given(group_score):
        # Experts of a group that rank it in models with these scores.
        best = 1 if scores == "softmax" else 2
        groups = fields.integer(_GROUPS[1], _MOST)
        chosen = fields.integer("moe_router_topk", _MOST, default=2) // groups
        if chosen != best:
            fields.wrong(
                group_score,
                "None or an integer. An earlier release wrote this checkpoint, which ranked groups "
                f"by the best {chosen} of their experts where models like this one take "
                f"the best {best}. If it was not trained, convert the original again; if it was, "
                "convert it to absorbed with a copy of the model's config.json in --hf-config, in "
                f'which "{group_score}" is {chosen}',
            )
    return {
        "moe_router_score_function": scores,
        "moe_layer_freq": _layers(fields),
        # The softmax of the chosen experts is that of all, divided by the sum of the chosen.
        normalised: of_chosen or _read(fields, normalised),
        **{name: fields.integer(name, _MOST) if limited else None for name in _GROUPS},
    }


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
