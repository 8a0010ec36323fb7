"""A model as options of Megatron's command line, and what no option can say."""

from __future__ import annotations

import itertools

from checkpoint_conversion.megatron_args import to_megatron_args
from checkpoint_conversion.model import ModelConfig

# Options in the order they are printed, by their names in the arguments of a checkpoint: those
# without a value, and those with one.
_SWITCHES = """
multi_latent_attention qk_layernorm swiglu untie_embeddings_and_output_weights
moe_router_pre_softmax moe_router_enable_expert_bias dsa_indexer_rope_interleaved use_mup bf16 fp16
"""
_VALUES = """
num_layers hidden_size ffn_hidden_size num_attention_heads q_lora_rank kv_lora_rank qk_head_dim
qk_pos_emb_head_dim v_head_dim normalization position_embedding_type max_position_embeddings
rope_type rotary_scaling_factor mscale mscale_all_dim attention_dropout hidden_dropout vocab_size
mtp_num_layers num_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk
moe_router_score_function moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor
moe_router_dtype experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim
dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_indexer_k_norm_epsilon
mup_embedding_mult mup_output_mult
"""
# Switches that are on unless the command line says no.
_ON_BY_DEFAULT = ("dsa_indexer_rotate_activation", "dsa_indexer_scoring_relu")
# Fields of Megatron's config that its command line has no option for, with their defaults there.
_WITHOUT_OPTION = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}


def megatron_options(config: ModelConfig) -> list[str]:
    """All options of Megatron 0.19's command line that describe a model, as words.

    Options of training, parallelism and the tokenizer are left out.

    Raises:
        CheckpointError: If config.json does not say what the model computes.
    """
    args = to_megatron_args(config)
    words = [_option(name) for name in _SWITCHES.split() if getattr(args, name, False)]
    words += [_option(f"no_{name}") for name in _ON_BY_DEFAULT if not getattr(args, name, True)]
    words.append("--disable-bias-linear")
    for name in _VALUES.split():
        value = getattr(args, name, None)
        if value is not None:
            words += [_option(name), str(value)]
    words += ["--norm-epsilon", str(args.norm_epsilon)]
    # The option takes whole numbers only.
    if isinstance(args.rotary_base, int):
        words += ["--rotary-base", str(args.rotary_base)]
    if args.num_experts is not None:
        words += ["--moe-layer-freq", _pattern(args.moe_layer_freq)]
    return words


def without_option(config: ModelConfig) -> dict[str, float]:
    """Fields of ``MLATransformerConfig`` that the model needs and no option can set."""
    args = to_megatron_args(config)
    result: dict[str, float] = {}
    if args.rope_type == "yarn":
        result = {
            name: getattr(args, name)
            for name, default in _WITHOUT_OPTION.items()
            if getattr(args, name) != default
        }
    if not isinstance(args.rotary_base, int):
        result["rotary_base"] = args.rotary_base
    return result


def option_notes(config: ModelConfig) -> list[str]:
    """A note about :func:`without_option`, if there are any."""
    fields = without_option(config)
    if not fields:
        return []
    values = ", ".join(f"{name}={value:g}" for name, value in fields.items())
    return [
        f"Megatron's command line has no option for {values}: set them in MLATransformerConfig, or "
        "the rotary embedding is another one"
    ]


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _pattern(layers: list[int]) -> str:
    """Zeros and ones per layer as Megatron's expression, such as ``([0]*3+[1]*58)``."""
    runs = [(kind, len(list(group))) for kind, group in itertools.groupby(layers)]
    return "(" + "+".join(f"[{kind}]*{count}" for kind, count in runs) + ")"
