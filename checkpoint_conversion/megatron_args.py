"""A model as the command-line arguments of Megatron-LM, which its checkpoints carry, and back.

With ``--use-checkpoint-args``, Megatron 0.19 takes from them what it calls model arguments:
layers, widths, experts, vocabulary and more, but nothing of the attention.
``--multi-latent-attention`` with its ranks, head widths and rotary options, ``--norm-epsilon`` and
the groups of the router must be on the command line again. What Megatron's router cannot do
(``routing.py``) is on no command line of Megatron-LM's: its spec function must say so.

Which layers are mixtures of experts is ``moe_layer_freq``: a number, a list, or an expression such
as ``([0]*3+[1]*58)``.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch

from checkpoint_conversion.config_fields import (
    MOST_EXPERTS,
    MOST_MTP_LAYERS,
    MOST_POSITIONS,
    MOST_VOCABULARY,
    MOST_WIDTH,
    Fields,
    shown,
)
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.indexer import (
    has_indexer_args,
    indexer_args,
    read_indexer_args,
    sparse_model,
)
from checkpoint_conversion.model import (
    DIMENSIONS,
    DTYPES,
    ModelConfig,
    ModelFunction,
    read_function,
)
from checkpoint_conversion.model_type import ModelType, model_of, of_arguments
from checkpoint_conversion.moe_pattern import moe_layers, parse_moe_layer_freq
from checkpoint_conversion.mup import MUP, read_scales_args
from checkpoint_conversion.rotary import (
    BETA,
    FACTORS,
    LAYER_OPTIONS,
    Rotary,
    check_scaling,
    read_beta,
    read_rotary_args,
)
from checkpoint_conversion.router_comparison import routing_notes
from checkpoint_conversion.routing import (
    NORMALISED,
    ROUTER_OPTIONS,
    read_routing_args,
    routing_args,
)

# Epsilon of the norms inside the attention in Hugging Face's models.
_LATENT_NORM_EPSILON = 1e-6
# Argument, and option of our layers, for a norm of the experts' output.
POST_NORM = "post_mlp_layernorm"

# Arguments that are the same for all supported models.
# fmt: off
COMMON_ARGS: dict[str, object] = {
    "multi_latent_attention": True, "swiglu": True, "normalization": "RMSNorm",
    "apply_layernorm_1p": False, "qk_layernorm": True, "add_bias_linear": False,
    "add_qkv_bias": False, "squared_relu": False, "group_query_attention": False,
    "num_query_groups": 1, "apply_query_key_layer_scaling": False,
    "position_embedding_type": "rope", "add_position_embedding": True,
    "use_rotary_position_embeddings": False, "rotary_percent": 1.0, "rotary_interleaved": False,
    "attention_dropout": 0.0, "hidden_dropout": 0.0,
}
# fmt: on
# Required values.
_REQUIRED = {
    name: COMMON_ARGS[name] for name in ("multi_latent_attention", "swiglu", "normalization")
}
# Other values make another model. None: the argument must not be set.
# fmt: off
_ONLY: dict[str, object] = {
    "add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": True, "squared_relu": False,
    "apply_layernorm_1p": False, "layernorm_zero_centered_gamma": False, "rotary_percent": 1.0,
    "rotary_interleaved": False, "mtp_use_repeated_layer": False, "moe_shared_expert_gate": False,
    "moe_latent_size": None, "hybrid_layer_pattern": None, "hybrid_override_pattern": None,
    "heterogeneous_layers_config_path": None, "heterogeneous_layers_config_encoded_json": None,
    "attention_output_gate": False, "softmax_type": "vanilla", "window_size": None,
}
# fmt: on
# Kernels that need apex or a CUDA extension, and the RoPE fusion that MLA refuses.
_FUSED_PARTS = (
    "masked_softmax_fusion",
    "bias_dropout_fusion",
    "bias_activation_fusion",
    "gradient_accumulation_fusion",
    "persist_layer_norm",
    "apply_rope_fusion",
)


def to_megatron_args(
    config: ModelConfig,
    *,
    tensor_parallel: int = 1,
    dtype: torch.dtype | None = None,
    padded_vocab_size: int | None = None,
) -> Namespace:
    """The arguments that a Megatron-LM run of this model would store.

    They hold strings, numbers, lists, None and one ``torch.dtype``: with ``weights_only=True``,
    ``argparse.Namespace`` is the one class that must be allowed to load them.

    Args:
        config: The model, with its config.json.
        tensor_parallel: Tensor-parallel size of the run.
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
        **function.mup,
        **indexer_args(config.indexer, config.model.sparse),
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
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        expert_model_parallel_size=1,
    )


def config_fields(args: Namespace, config_class: Any) -> dict[str, object]:
    """Fields of Megatron's config for a model by :func:`to_megatron_args` whose weights are read.

    They choose no kernels that need more than PyTorch, and say nothing of parallelism;
    ``config_class`` is ``MLATransformerConfig``.
    """
    known = {field.name for field in dataclasses.fields(config_class)}
    return {name: value for name, value in vars(args).items() if name in known} | {
        # Arguments with another name in the config, or that only work with a second one.
        "num_query_groups": None,
        "num_moe_experts": args.num_experts,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "perform_initialization": False,
        **dict.fromkeys(_FUSED_PARTS, False),
    }


def router_options(args: Namespace) -> dict[str, object]:
    """What ``AbsorbedMLAOptions`` must say of a model's router, by :func:`to_megatron_args`."""
    return {name: getattr(args, name, None) for name in ROUTER_OPTIONS}


def layer_options(args: Namespace) -> dict[str, object]:
    """What ``AbsorbedMLAOptions`` must say of a model, by :func:`to_megatron_args`."""
    own = {name: getattr(args, name, None) for name in LAYER_OPTIONS}
    own |= {"latent_norm_eps": args.latent_norm_epsilon, **router_options(args)}
    return {**own, POST_NORM: getattr(args, POST_NORM, False)}


def model_notes(config: ModelConfig) -> list[str]:
    """Where this package computes something else than the authors' code, one line each."""
    fields, why = config.fields, config.model.ignores_norm_topk_prob
    # What was made of Megatron's arguments says it otherwise.
    if why is None or not fields.equals("norm_topk_prob", True) or fields.given(NORMALISED):
        return []
    return [f"norm_topk_prob is true: {why}"]


def megatron_notes(config: ModelConfig) -> list[str]:
    """Where Megatron computes something else with the same weights, one line each.

    Those of :func:`model_notes` are among them.

    Raises:
        CheckpointError: If config.json does not say what the model computes.
    """
    function = _function(config)
    notes = routing_notes(function.routing) if function.routing else []
    if function.norm_epsilon != _LATENT_NORM_EPSILON:
        notes.append(
            f"rms_norm_eps is {config.fields.raw('rms_norm_eps'):g}: Hugging Face's norms inside "
            f"the attention have {_LATENT_NORM_EPSILON:g} all the same, Megatron's own have "
            "--norm-epsilon (absorbed MLA has latent_norm_eps)"
        )
    rotary = function.rotary
    if rotary.llama_4_scaling_beta is not None:
        notes.append(
            f"{BETA} is {rotary.llama_4_scaling_beta:g}: the model scales queries at position "
            f"{rotary.original_max_position_embeddings} and beyond, Megatron's own attention none "
            f"(absorbed MLA has {BETA})"
        )
    if rotary.rope_factors is not None:
        notes.append(f"Megatron's own attention has no LongRoPE (absorbed MLA has {FACTORS})")
    if function.routing and config.model.post_mlp_layernorm:
        notes.append(
            "the model norms the experts' output, Megatron's own layers do not (this package's "
            f"have {POST_NORM})"
        )
    return [*notes, *model_notes(config)]


def _function(config: ModelConfig) -> ModelFunction:
    fields = config.fields
    function = read_function(fields, config)
    fields.raise_problems("config.json does not say what Megatron needs to know:")
    return function


def _dimensions(config: ModelConfig) -> dict[str, object]:
    return {
        **{argument: getattr(config, field) for field, (_, argument, _) in DIMENSIONS.items()},
        "q_lora_rank": config.q_lora_rank,
        "vocab_size": config.vocab_size,
        "untie_embeddings_and_output_weights": not config.tied_embeddings,
        "mtp_num_layers": config.mtp_layers or None,
    }


def _experts(config: ModelConfig, function: ModelFunction) -> dict[str, object]:
    routing = function.routing
    if routing is None:
        return {"num_experts": None, "moe_layer_freq": 1}
    shared = config.num_shared_experts * config.moe_ffn_hidden_size
    return {
        "num_experts": config.num_experts,
        "moe_layer_freq": [int(moe) for moe in config.moe_layers],
        "moe_ffn_hidden_size": config.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": shared or None,
        POST_NORM: config.model.post_mlp_layernorm,
        **routing_args(routing),
    }


def _rotary(rotary: Rotary) -> dict[str, object]:
    base = rotary.rotary_base
    # The option takes integers.
    return {**vars(rotary), "rotary_base": int(base) if base == int(base) else base}


def from_megatron_args(
    args: Namespace | Mapping[str, object], prefix: str = "args."
) -> ModelConfig:
    """The model that Megatron-LM's arguments describe, with a config.json for it.

    Kimi-K2 and Moonlight become DeepSeek-V3, whose architecture they have. The arguments do not
    hold a tokenizer's special tokens, so config.json names none.

    Args:
        args: As a checkpoint of Megatron carries them.
        prefix: Precedes their names in messages.

    Raises:
        CheckpointError: Listing arguments that are missing or that no Hugging Face model has.
    """
    values = vars(args) if isinstance(args, Namespace) else args
    if not isinstance(values, Mapping):
        raise CheckpointError(f"A checkpoint's args must be a namespace, got {shown(args)}")
    fields = Fields(values, [], prefix)
    check_kind(fields)
    rotary = read_rotary_args(fields)
    check_scaling(fields, rotary)
    config = {
        **_read_dimensions(fields),
        **_read_experts(fields),
        **read_indexer_args(fields, read_norm_epsilon(fields)),
        **rotary.hugging_face(),
        **read_scales_args(fields),
        **_dtype(fields),
        "bos_token_id": None,
        "eos_token_id": None,
    }
    fields.raise_problems("The checkpoint's arguments describe no model that can be converted:")
    return ModelConfig.from_hugging_face(config)


def check_kind(fields: Fields) -> None:
    """Record every argument that belongs to another kind of model."""
    for name, accepted in (_REQUIRED | _ONLY).items():
        fields.only(name, accepted)
        if name in _REQUIRED and not fields.given(name):
            fields.wrong(name, shown(accepted))
    variant = "experimental_attention_variant"
    if fields.given(variant) and not has_indexer_args(fields):
        fields.wrong(variant, "None or 'dsa'")
    if fields.given("dsa_indexer_n_heads") and not fields.given(variant):
        fields.wrong("dsa_indexer_n_heads", f"None without {variant}")


def _read_dimensions(fields: Fields) -> dict[str, object]:
    dimensions = {
        name: fields.integer(argument, most) for name, argument, most in DIMENSIONS.values()
    }
    # Megatron's --vocab-size is without what a tokenizer adds.
    padded = fields.given("tokenizer_type") or not fields.given("vocab_size")
    return {
        "vocab_size": fields.integer(
            "padded_vocab_size" if padded else "vocab_size", MOST_VOCABULARY
        ),
        **dimensions,
        "num_nextn_predict_layers": fields.integer(
            "mtp_num_layers", MOST_MTP_LAYERS, least=0, default=0
        ),
        "num_key_value_heads": dimensions["num_attention_heads"],
        "q_lora_rank": fields.integer_or_null("q_lora_rank", MOST_WIDTH),
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": read_norm_epsilon(fields),
        "max_position_embeddings": fields.integer("max_position_embeddings", MOST_POSITIONS),
        "tie_word_embeddings": not fields.boolean(
            "untie_embeddings_and_output_weights", default=False
        ),
    }


def read_norm_epsilon(fields: Fields) -> float:
    """Read the epsilon of the norms around attention and MLP."""
    # Megatron 0.19's name, and that of earlier releases.
    names = ("layernorm_epsilon", "norm_epsilon")
    return fields.number(next(filter(fields.given, names), names[0]), 1e-12, 1.0)


def _read_experts(fields: Fields) -> dict[str, object]:
    if not fields.given("num_experts"):
        # Dense models of V2 and V3 are the same.
        kind = _kind(_model(fields, None))
        return {**kind, "first_k_dense_replace": fields.raw("num_layers")}
    width = fields.integer("moe_ffn_hidden_size", MOST_WIDTH)
    shared = fields.integer("moe_shared_expert_intermediate_size", 2**30, least=0, default=0)
    if shared % width:
        fields.wrong("moe_shared_expert_intermediate_size", f"a multiple of {width}")
    return {
        "n_routed_experts": fields.integer("num_experts", MOST_EXPERTS),
        "n_shared_experts": shared // width,
        "moe_intermediate_size": width,
        **_layer_pattern(fields),
        **_routing(fields),
    }


def _routing(fields: Fields) -> dict[str, object]:
    routing = read_routing_args(fields)
    scores = str(routing["scoring_func"])
    if scores == "softmax" and has_indexer_args(fields):
        fields.wrong("moe_router_score_function", "'sigmoid' with sparse attention")
    model = _model(fields, scores)
    if not model.ignores_norm_topk_prob:
        routing.pop(NORMALISED, None)
    return {**_kind(model), **routing}


def _model(fields: Fields, scores: str | None) -> ModelType:
    """The model type, by the router's scores (None without experts) and what few models have."""
    sparse = has_indexer_args(fields)
    if fields.given(FACTORS) or fields.equals(MUP, True):
        if sparse or scores or read_beta(fields) is not None:
            name = FACTORS if fields.given(FACTORS) else MUP
            fields.wrong(name, "left out with experts, sparse attention or scaled queries")
        return model_of("minicpm3")
    normed = scores is not None and fields.boolean(POST_NORM, default=False)
    if normed and (sparse or scores == "softmax"):
        fields.wrong(POST_NORM, "False with softmax scores or sparse attention")
        normed = False
    if read_beta(fields) is None:
        if sparse:
            return sparse_model(fields)
        return of_arguments(scores or "sigmoid", None, post_mlp_layernorm=normed)
    if sparse or scores == "sigmoid":
        fields.wrong(BETA, "None with sigmoid scores or sparse attention")
    return of_arguments("softmax", None, scales_queries=True)


def _kind(model: ModelType) -> dict[str, object]:
    """Model type and architecture."""
    return {"architectures": [model.architectures[0]], "model_type": model.name}


def _layer_pattern(fields: Fields) -> dict[str, object]:
    """The two fields of config.json that say which layers are mixtures of experts."""
    freq = fields.raw("moe_layer_freq") if fields.given("moe_layer_freq") else 1
    layers = fields.raw("num_layers")
    if fields.problems or not isinstance(layers, int):
        return {}
    try:
        pattern = moe_layers(parse_moe_layer_freq(freq), layers)
    except ValueError as error:
        fields.problems.append(str(error))
        return {}
    experts = [layer for layer, moe in enumerate(pattern) if moe]
    first, every = experts[0] if experts else layers, 1
    if len(experts) > 1:
        every = experts[1] - first
    elif first < layers - 1:
        # A single one, and dense layers after it.
        every = first or layers
    if pattern != tuple(int(i >= first and i % every == 0) for i in range(layers)):
        fields.wrong("moe_layer_freq", "dense layers, then every N-th a mixture of experts")
    found: dict[str, object] = {"first_k_dense_replace": first, "moe_layer_freq": every}
    if every > 1 and has_indexer_args(fields):
        # These models of transformers do not read moe_layer_freq.
        found["mlp_layer_types"] = ["sparse" if moe else "dense" for moe in pattern]
    return found


def _dtype(fields: Fields) -> dict[str, object]:
    names = {dtype: name for name, dtype in DTYPES.items()}
    dtype = fields.raw("params_dtype")
    if dtype is None:
        flags = [fields.boolean(flag, default=False) for flag in ("bf16", "fp16")]
        return {"torch_dtype": "bfloat16" if flags[0] else "float16" if flags[1] else "float32"}
    if not isinstance(dtype, torch.dtype) or dtype not in names:
        fields.wrong("params_dtype", " or ".join(map(str, names)))
        return {}
    return {"torch_dtype": names[dtype]}
