"""A model as the command-line arguments of Megatron-LM, which its checkpoints carry, and back.

With ``--use-checkpoint-args``, Megatron 0.19 takes from them what it calls model arguments:
layers, widths, experts, vocabulary and more, but nothing of the attention.
``--multi-latent-attention`` with its ranks, head widths and rotary options, ``--norm-epsilon`` and
the groups of the router must be on the command line again.
"""

from __future__ import annotations

import itertools
import shlex
from argparse import Namespace

import torch

from checkpoint_conversion.config_fields import Fields
from checkpoint_conversion.megatron_args_reading import from_megatron_args
from checkpoint_conversion.model import ModelConfig, ModelFunction, read_function
from checkpoint_conversion.model_function import Rotary, routing_differences

__all__ = [
    "COMMON_ARGS",
    "from_megatron_args",
    "megatron_notes",
    "routing_notes",
    "to_megatron_args",
]

# Epsilon of the norms inside the attention in Hugging Face's models.
_LATENT_NORM_EPSILON = 1e-6

# Arguments that are the same for all supported models.
COMMON_ARGS: dict[str, object] = {
    "multi_latent_attention": True,
    "swiglu": True,
    "normalization": "RMSNorm",
    "apply_layernorm_1p": False,
    "qk_layernorm": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "squared_relu": False,
    "group_query_attention": False,
    "num_query_groups": 1,
    "apply_query_key_layer_scaling": False,
    "position_embedding_type": "rope",
    "add_position_embedding": True,
    "use_rotary_position_embeddings": False,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


def to_megatron_args(
    config: ModelConfig,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    dtype: torch.dtype | None = None,
    padded_vocab_size: int | None = None,
) -> Namespace:
    """The arguments that a Megatron-LM run of this model would store.

    They hold strings, numbers, lists, None and one ``torch.dtype``: with ``weights_only=True``,
    ``argparse.Namespace`` is the one class that must be allowed to load them.

    Args:
        config: The model, with its config.json.
        tensor_parallel: Tensor-parallel size of the run.
        pipeline_parallel: Pipeline-parallel size of the run.
        dtype: Dtype of the weights; None takes config.json's, else bfloat16.
        padded_vocab_size: Rows of the embedding; None if it is not padded.

    Raises:
        CheckpointError: If config.json does not say what the model computes.
    """
    function = _function(config)
    dtype = dtype or config.dtype or torch.bfloat16
    return Namespace(
        **COMMON_ARGS,
        **_dimensions(config),
        **_experts(config, function),
        **_rotary(function.rotary),
        # Megatron 0.19's name, and that of earlier releases.
        layernorm_epsilon=function.norm_epsilon,
        norm_epsilon=function.norm_epsilon,
        # Absorbed MLA's own option, which Megatron does not have.
        latent_norm_epsilon=_LATENT_NORM_EPSILON,
        max_position_embeddings=function.max_position_embeddings,
        padded_vocab_size=padded_vocab_size or config.vocab_size,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        virtual_pipeline_model_parallel_size=None,
        expert_model_parallel_size=1,
    )


def routing_notes(config: ModelConfig) -> list[str]:
    """Where Megatron's router differs with the same weights, one line each.

    Raises:
        CheckpointError: If config.json does not say what the model computes.
    """
    routing = _function(config).routing
    return routing_differences(routing, config.model_type) if routing else []


def megatron_notes(config: ModelConfig) -> list[str]:
    """Where Megatron computes something else with the same weights, one line each.

    Raises:
        CheckpointError: If config.json does not say what the model computes.
    """
    notes = routing_notes(config)
    epsilon = _function(config).norm_epsilon
    if epsilon != _LATENT_NORM_EPSILON:
        notes.append(
            f"rms_norm_eps is {epsilon:g}: Hugging Face's norms inside the attention have "
            f"{_LATENT_NORM_EPSILON:g} all the same, Megatron's own have --norm-epsilon (absorbed "
            "MLA has latent_norm_eps)"
        )
    return notes


def _function(config: ModelConfig) -> ModelFunction:
    fields = Fields(config.hugging_face, [])
    function = read_function(fields, config)
    fields.raise_problems("config.json does not say what Megatron needs to know:")
    return function


def _dimensions(config: ModelConfig) -> dict[str, object]:
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "vocab_size": config.vocab_size,
        "untie_embeddings_and_output_weights": not config.tied_embeddings,
        "mtp_num_layers": config.mtp_layers or None,
    }


def _experts(config: ModelConfig, function: ModelFunction) -> dict[str, object]:
    routing = function.routing
    if routing is None:
        return {"num_experts": None, "moe_layer_freq": 1}
    limited = routing.n_group > 1
    normalised = routing.scoring_func == "softmax" and routing.norm_topk_prob
    shared = config.num_shared_experts * config.moe_ffn_hidden_size
    return {
        "num_experts": config.num_experts,
        "moe_layer_freq": [int(moe) for moe in config.moe_layers],
        "moe_ffn_hidden_size": config.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_router_topk": routing.num_experts_per_tok,
        "moe_router_score_function": routing.scoring_func,
        "moe_router_pre_softmax": not normalised,
        "moe_router_enable_expert_bias": routing.score_correction,
        "moe_router_topk_scaling_factor": routing.routed_scaling_factor,
        "moe_router_num_groups": routing.n_group if limited else None,
        "moe_router_group_topk": routing.topk_group if limited else None,
        "moe_router_dtype": "fp32",
    }


def _rotary(rotary: Rotary) -> dict[str, object]:
    base = rotary.rotary_base
    # The option takes integers.
    return {**vars(rotary), "rotary_base": int(base) if base == int(base) else base}


# Options in the order they are printed, by their names in the arguments of a checkpoint.
_SWITCHES = (
    "multi_latent_attention",
    "qk_layernorm",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "moe_router_pre_softmax",
    "moe_router_enable_expert_bias",
    "bf16",
    "fp16",
)
_VALUES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "normalization",
    "position_embedding_type",
    "max_position_embeddings",
    "rope_type",
    "rotary_scaling_factor",
    "mscale",
    "mscale_all_dim",
    "attention_dropout",
    "hidden_dropout",
    "vocab_size",
    "mtp_num_layers",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_dtype",
)
# Fields of Megatron's config that its command line has no option for, with their defaults there.
_WITHOUT_OPTION = {
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def megatron_options(config: ModelConfig) -> list[str]:
    """All options of Megatron 0.19's command line that describe a model, as words.

    Options of training, parallelism and the tokenizer are left out.

    Raises:
        CheckpointError: If config.json does not say what the model computes.
    """
    args = to_megatron_args(config)
    words = [_option(name) for name in _SWITCHES if getattr(args, name, False)]
    words.append("--disable-bias-linear")
    for name in _VALUES:
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


def as_line(words: list[str]) -> str:
    """Words as one line for a shell."""
    return shlex.join(words)


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
