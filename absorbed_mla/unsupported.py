"""Refusals: what Megatron can request and this attention does not support, each a ValueError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend, LayerType
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from absorbed_mla.checkpoint.hybrid_names import KDA_SYMBOL
from absorbed_mla.dims import MLADims

# Config field -> (supported values, what holds or what to do instead).
_CONFIG_FIELDS: dict[str, tuple[tuple, str]] = {
    "multi_latent_attention": ((True,), "AbsorbedMLASelfAttention is an MLA layer"),
    "fp8_dot_product_attention": ((False,), "linear layers are in FP8, attention is in bf16"),
    "fp8_multi_head_attention": ((False,), "linear layers are in FP8, attention is in bf16"),
    "fp4": ((None, False), "it needs Blackwell GPUs, which it was not tested on; use fp8"),
    "flash_decode": ((False,), "latents are cached, not keys and values"),
    "experimental_attention_variant": ((None, "dsa"), "it is dense, or DeepSeek's sparse one"),
    "apply_query_key_layer_scaling": ((False,), "scores are computed in fp32"),
    "qk_l2_norm": ((False,), "use qk_layernorm, the RMSNorm of MLA's latents"),
    "softmax_type": (("vanilla", "off-by-one", "learnable"), "a sink is 0 or learned"),
    "softmax_scale": ((None,), "MLA's scale follows from its head dim and mscale_all_dim"),
    "attention_backend": ((AttnBackend.auto,), "see AbsorbedMLAOptions.core_attention_backend"),
    "normalization": (("RMSNorm",), "MLA's norms are RMSNorm"),
    "transformer_impl": (("local", "transformer_engine"), "it has one implementation"),
    "hierarchical_context_parallel_sizes": (
        (None,),
        "latents are exchanged within one flat context-parallel group",
    ),
    "mrope_section": ((None,), "positions are one-dimensional"),
    "add_qkv_bias": ((False,), "MLA's projections have no bias"),
    "quant_recipe": ((None,), "one fp8_recipe holds for all layers"),
    "use_kitchen": ((False,), "layers are local or TransformerEngine's"),
}


def refuse_fields(
    who: str, config: MLATransformerConfig, fields: Mapping[str, tuple[tuple, str]]
) -> None:
    """Refuse values of config fields.

    Args:
        who: Does not support them.
        config: Of the layer; a field that it does not have is not refused.
        fields: By name the supported values, and what holds or what to do instead.

    Raises:
        ValueError: Naming the field, what it is and what is supported.
    """
    for name, (accepted, advice) in fields.items():
        value = getattr(config, name, accepted[0])
        if value not in accepted:
            raise ValueError(
                f"{who} does not support {name}={value!r}: {advice}; set it to {accepted[0]!r}"
            )


def refuse_unsupported_config(config: MLATransformerConfig) -> None:
    """Refuse config fields that would otherwise be ignored.

    Raises:
        ValueError: Naming the field, what it is and what is supported.
    """
    fields = dict(_CONFIG_FIELDS)
    if config.experimental_attention_variant == "kda":
        _require_kda_layers(config)
        del fields["experimental_attention_variant"]
    if getattr(config, "batch_invariant_mode", False):
        del fields["attention_backend"]  # Megatron demands attention_backend=flash in that mode
    if getattr(config, "use_mup", False):
        del fields["softmax_scale"]  # MuP sets it, and Megatron's MLA has its own all the same
    refuse_fields("AbsorbedMLASelfAttention", config, fields)
    if config.num_query_groups not in (None, config.num_attention_heads):
        raise ValueError(
            f"num_query_groups must be None or num_attention_heads={config.num_attention_heads} "
            f"(MLA has no query groups), got {config.num_query_groups}"
        )
    if not getattr(config, "cache_mla_latents", False):
        refuse_full_iterations(config)  # Otherwise it generates, and may never train.
    if getattr(config, "fp8_param", False) and config.use_cpu_initialization:
        raise ValueError(
            "fp8_param=True needs use_cpu_initialization=False: TransformerEngine would read the "
            "CPU's memory on the GPU"
        )


def refuse_full_iterations(config: MLATransformerConfig) -> None:
    """Refuse Megatron's graphs of whole iterations of training; generation takes no notice of them.

    Raises:
        ValueError: If the config asks for them.
    """
    if config.cuda_graph_impl == "full_iteration":
        raise ValueError(
            "AbsorbedMLASelfAttention does not support cuda_graph_impl='full_iteration' in "
            "training: graphs of a whole iteration were not tried; set it to 'none', or to "
            "'local' or 'transformer_engine' (a model that only generates may have it, with "
            "cache_mla_latents=True)"
        )


def refuse_tied_embeddings_beside_mtp(config: MLATransformerConfig, tied: bool) -> None:
    """Refuse one stage with MTP and a tied output layer behind others; all stages say so.

    Such a stage has the shared weight twice, and Megatron (0.19) can make no checkpoint of it.

    Args:
        config: Of the model, on any pipeline stage.
        tied: Whether embedding and output layer share their weight.

    Raises:
        ValueError: If that is so on the last stage.
    """
    stages = config.pipeline_model_parallel_size
    if not (tied and config.mtp_num_layers and stages > 1):
        return
    layout = config.pipeline_model_parallel_layout
    if layout is None or layout.layout[-1][-1].count(LayerType.mtp):
        raise ValueError(
            f"share_embeddings_and_output_weights=True with mtp_num_layers={config.mtp_num_layers} "
            f"needs pipeline_model_parallel_size=1, got {stages}: Megatron makes no checkpoint of "
            "a last stage that has both MTP and the output layer; untie the weights, or let "
            "pipeline_model_parallel_layout put MTP on a stage of its own"
        )


def _require_kda_layers(config: MLATransformerConfig) -> None:
    """Refuse KDA where Megatron has no such layers, or would build none."""
    if KDA_SYMBOL is None:
        raise ValueError(
            "experimental_attention_variant='kda' needs a Megatron-Core with layers of Kimi Delta "
            "Attention (Symbols.KDA, KimiDeltaAttention), which releases up to 0.19.2 lack and "
            "branch dev has since pull request 6556; set it to None or 'dsa'"
        )
    if not config.is_hybrid_model:
        raise ValueError(
            "experimental_attention_variant='kda' needs is_hybrid_model=True, got False: the "
            "hybrid_layer_pattern of a HybridModel says which layers are KDA"
        )


def variant_of_mla(config: MLATransformerConfig) -> str | None:
    """What MLA layers compute of ``experimental_attention_variant``; KDA is other layers'."""
    variant = config.experimental_attention_variant
    return None if variant == "kda" else variant


def refuse_other_variant(config: MLATransformerConfig, core_attention: Any) -> None:
    """Refuse a core attention that was made for another ``experimental_attention_variant``.

    Raises:
        ValueError: If the config asks for another.
    """
    asked, made = variant_of_mla(config), core_attention.variant
    if asked != made:
        raise ValueError(
            f"experimental_attention_variant={asked!r}, but the spec's core_attention "
            f"({type(core_attention).__name__}) is for {made!r}; build the spec with this config"
        )


def refuse_unsupported_input(
    hidden_states: Tensor, dims: MLADims, parameter_dtype: torch.dtype
) -> None:
    """Refuse hidden states of a shape or dtype that the layer was not built for.

    Raises:
        ValueError: Naming what was given and what is expected.
    """
    if hidden_states.ndim != 3 or hidden_states.shape[-1] != dims.hidden_size:
        raise ValueError(
            f"hidden_states must be [tokens, batch, hidden_size={dims.hidden_size}], "
            f"got {tuple(hidden_states.shape)}"
        )
    if torch.is_autocast_enabled(hidden_states.device.type):
        raise ValueError(
            "torch.autocast is not supported: choose the precision as Megatron does, with "
            "bf16=True or fp16=True in the config"
        )
    if hidden_states.dtype != parameter_dtype:
        raise ValueError(
            f"hidden_states must have the parameters' dtype {parameter_dtype}, "
            f"got {hidden_states.dtype}"
        )


# Config field -> the same, for packs with shared prefixes.
_PREFIX_FIELDS: dict[str, tuple[tuple, str]] = {
    "attention_dropout": ((0.0,), "sequences that share tokens would drop the same of them"),
    "hidden_dropout": ((0.0,), "sequences that share tokens would drop the same of them"),
}


def refuse_shared_prefixes(
    config: MLATransformerConfig,
    *,
    window: int | None,
    causal: bool,
    training: bool,
) -> None:
    """Refuse what does not go with the ``prefix_tree`` of ``packed_seq_params``.

    Args:
        config: Of the layer.
        window: Keys that a token sees, at most.
        causal: Whether a token sees only itself and earlier tokens.
        training: Whether there is dropout.

    Raises:
        ValueError: Naming the option, what it is and what is supported.
    """
    if training:
        refuse_fields("A pack with shared prefixes", config, _PREFIX_FIELDS)
    if window is not None:
        raise ValueError(
            "packed_seq_params.prefix_tree must be None for a layer with a window_size, got a "
            f"PrefixTree and a window of {window}: windows do not reach over nodes"
        )
    if not causal:
        raise ValueError(
            "packed_seq_params.prefix_tree needs a causal attn_mask_type, got another: a shared "
            "token would see the tokens of all sequences"
        )


def refuse_unsupported_arguments(**arguments: object) -> None:
    """Refuse arguments of Megatron's ``forward`` that have no meaning for this attention.

    Raises:
        ValueError: Naming the argument and what is supported.
    """
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"AbsorbedMLASelfAttention.forward does not support {name} "
                f"({_REASONS[name]}); pass None, got {type(value).__name__}"
            )


_REASONS = {
    "key_value_states": "it is self-attention",
    "sequence_len_offset": "the inference context says where its tokens are",
    "rotary_pos_emb": "MLA makes its own rotary embedding",
    "rotary_pos_cos": "MLA makes its own rotary embedding",
    "rotary_pos_sin": "MLA makes its own rotary embedding",
    "rotary_pos_cos_sin": "MLA makes its own rotary embedding",
    "position_ids": "positions follow from the sequence layout",
    "attention_bias": "scores take a mask, not a bias",
}


def refuse_unsupported_inference(
    config: MLATransformerConfig,
    context: Any,
    attention_mask: Tensor | None,
    packed_seq_params: object,
    tokens_and_batch: tuple[int, int],
    *,
    causal: bool,
    cp_size: int,
) -> None:
    """Refuse arguments that do not go with an inference context.

    Args:
        config: Of the layer.
        context: The inference context.
        attention_mask: Of the forward; None or the causal mask.
        packed_seq_params: Of the forward.
        tokens_and_batch: New tokens per request, and number of requests; in a dynamic context all
            new tokens, and 1.
        causal: Whether a token sees only itself and earlier tokens.
        cp_size: Number of context-parallel ranks.

    Raises:
        ValueError: Naming what was given and what is supported.
    """
    if torch.is_grad_enabled():
        raise ValueError(
            "inference_context needs torch.no_grad() or torch.inference_mode(): cached latents "
            "have no gradient"
        )
    if not causal:
        raise ValueError(
            "inference_context needs a causal attn_mask_type: a cached token was computed without "
            "those after it"
        )
    shared = getattr(context, "cache_ranks", None)
    if cp_size > 1 and (shared is None or shared.copies != cp_size):
        raise ValueError(
            f"inference_context needs context_parallel_size=1, got {cp_size}: every rank caches "
            "whole sequences, unless an engine with decode_context_parallel=True shares them"
        )
    if packed_seq_params is not None:
        raise ValueError(
            "packed_seq_params must be None with an inference_context, which says itself which "
            "tokens are whose"
        )
    static = getattr(context, "is_static_batching", lambda: False)()
    if static and config.cuda_graph_impl not in ("none", "full_iteration"):
        # A replayed graph would write every token to the cache position of the captured one.
        raise ValueError(
            f"cuda_graph_impl={config.cuda_graph_impl!r} cannot capture steps of a "
            "StaticInferenceContext, whose lengths are the host's; use a DynamicInferenceContext, "
            "or cuda_graph_impl='none'"
        )
    if attention_mask is not None:
        cached = int(context.sequence_len_offset) if static else 0
        _refuse_other_masks(attention_mask, *tokens_and_batch, cached)


def _refuse_other_masks(mask: Tensor, tokens: int, batch: int, cached: int) -> None:
    """Refuse any mask but the causal one."""
    keys = cached + tokens
    if tuple(mask.shape) not in ((1, 1, tokens, keys), (batch, 1, tokens, keys)):
        raise ValueError(
            "attention_mask must be None or the causal mask with an inference_context, of shape "
            f"[{batch} or 1, 1, {tokens} new tokens, {keys} cached and new tokens]; "
            f"got shape {tuple(mask.shape)}"
        )
    causal = torch.ones(tokens, keys, dtype=torch.bool, device=mask.device)
    if not bool((mask == causal.triu(cached + 1)).all()):
        raise ValueError(
            "attention_mask must be None or the causal mask with an inference_context, got "
            f"another of shape {tuple(mask.shape)}; to batch prompts of uneven length, use "
            "Megatron's engines"
        )
