"""What parity mode requires of options, config and process; one error for each requirement."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig

from absorbed_mla.batch_invariant import parts
from absorbed_mla.batch_invariant.mode import enable_batch_invariant_mode, is_enabled
from absorbed_mla.options import AbsorbedMLAOptions

# Of a config whose model has grouped experts (absorbed_mla/serving/experts).
_IN_ORDER = "absorbed_mla_experts_in_order"
_BACKENDS = ("auto", "hopper", "triton", "reference")
# Option -> (accepted values, why others are refused).
_OPTIONS: dict[str, tuple[tuple, str]] = {
    "form": (("auto", "absorbed"), "a token must be computed in one form"),
    "core_attention_backend": (_BACKENDS, "the others' order of sums depends on the batch"),
    "paged_attention_backend": (_BACKENDS, "the others' order of sums depends on the batch"),
    "latent_cache_tokens": ((None,), "parts of a cache would be summed up one by one"),
}
# Field of the config -> the same.
_CONFIG_FIELDS: dict[str, tuple[tuple, str]] = {
    "context_parallel_size": ((1,), "ranks would sum up parts of the keys"),
    "window_size": ((None,), "what a token sees would be summed up in two parts"),
    "moe_expert_capacity_factor": ((None,), "which tokens are dropped depends on the batch"),
    "moe_input_jitter_eps": ((None,), "it is random"),
    "fp8": ((None, False), "the scale of a token's values depends on the batch"),
    "moe_grouped_gemm": ((False,), "Megatron has no batch-invariant grouped product"),
}
# The same with ``tensor_parallel_parts``.
_FIELDS_OF_PARTS: dict[str, tuple[tuple, str]] = {
    "transformer_impl": (("local",), "TransformerEngine's layers have sums of their own"),
    "add_bias_linear": ((False,), "sums of the gradients of biases are not covered"),
    "gradient_accumulation_fusion": ((False,), "a kernel would sum up all parts at once"),
    "defer_embedding_wgrad_compute": ((False,), "Megatron would compute the gradient"),
    "gtp_weight_remat_size": ((1, None), "other ranks share the weights"),
    "cross_entropy_loss_fusion": ((False,), "it has sums of its own"),
    "moe_shared_expert_gate": ((False,), "sums of its gradient are not covered"),
    "moe_router_fusion": ((False,), "it has sums of its own"),
    "experimental_attention_variant": ((None,), "sums of an indexer's loss, or of KDA"),
}


def settle_options(
    options: AbsorbedMLAOptions, config: MLATransformerConfig, *, causal: bool, tp_size: int
) -> AbsorbedMLAOptions:
    """The options of a layer; in parity mode with form and backends set to what it requires.

    Args:
        options: The user's.
        config: Its ``batch_invariant_mode`` switches parity mode on as well.
        causal: Whether a token sees itself and earlier tokens only.
        tp_size: Tensor-parallel ranks.

    Raises:
        ValueError: If something contradicts parity mode.
    """
    if getattr(config, "batch_invariant_mode", False):
        options = options.replace(batch_invariant=True)
    if not options.batch_invariant:
        return options
    for name, (accepted, reason) in _OPTIONS.items():
        _require(name, getattr(options, name, accepted[0]), accepted, reason)
    for name, (accepted, reason) in _CONFIG_FIELDS.items():
        _require(name, getattr(config, name, accepted[0]), accepted, reason)
    balancing = getattr(config, "moe_router_load_balancing_type", None)
    if "sinkhorn" in (balancing if isinstance(balancing, list) else [balancing]):
        raise ValueError(
            "batch_invariant=True does not go with moe_router_load_balancing_type='sinkhorn', "
            "whose choice of experts depends on the batch"
        )
    if not causal:
        raise ValueError("batch_invariant=True needs causal attention (attn_mask_type=causal)")
    if tp_size > 2 and config.transformer_impl == "transformer_engine":
        raise ValueError(
            "batch_invariant=True with transformer_impl='transformer_engine' needs at most 2 "
            f"tensor-parallel ranks, got {tp_size}: its layers sum over ranks in an order that "
            "depends on a token's place; use transformer_impl='local'"
        )
    return options.replace(form="absorbed", **_one_backend(options))


def _one_backend(options: AbsorbedMLAOptions) -> dict[str, str]:
    """The same backend for training and cache; ``"auto"`` if the device is to decide."""
    names = ("core_attention_backend", "paged_attention_backend")
    explicit = {getattr(options, name) for name in names} - {"auto"}
    if len(explicit) > 1:
        raise ValueError(
            "batch_invariant=True needs one backend: core_attention_backend="
            f"{options.core_attention_backend!r} and paged_attention_backend="
            f"{options.paged_attention_backend!r} differ; leave one of them 'auto'"
        )
    return dict.fromkeys(names, next(iter(explicit), "auto"))


def require_enabled(device: torch.device, config: MLATransformerConfig) -> None:
    """Refuse to run a layer in a process whose operators are not batch-invariant.

    Args:
        device: Of the layer.
        config: Of the model.

    Raises:
        ValueError: If batch-invariant mode is off, or does not cover such a model.
    """
    if not is_enabled(device):
        raise ValueError(
            "batch_invariant=True needs the process's operators to be independent of the batch: "
            "call absorbed_mla.batch_invariant.enable_batch_invariant_mode() before the first "
            f"forward (it is off for device type {device.type!r})"
        )
    if parts.fixed.count is not None:
        _require_parts(config)
    if device.type == "cuda" and _adds_experts_by_atomics(config):
        raise ValueError(
            f"batch_invariant=True with moe_router_topk={config.moe_router_topk} needs "
            "torch.use_deterministic_algorithms(True) or moe_permute_fusion=True on a GPU: "
            "Megatron would add up the experts' results in any order"
        )
    # If Megatron's own function switched the mode on, its operators are exchanged for ours.
    enable_batch_invariant_mode(device.type)


def _require_parts(config: MLATransformerConfig) -> None:
    """Refuse a model with sums that ``tensor_parallel_parts`` does not cover."""
    for name, (accepted, reason) in _FIELDS_OF_PARTS.items():
        _require(name, getattr(config, name, accepted[0]), accepted, reason, parts.OPTION)
    if config.num_moe_experts:
        fused = (False,), "it sums up the gradients of probabilities at once"
        _require("bias_activation_fusion", config.bias_activation_fusion, *fused, parts.OPTION)
        if config.expert_model_parallel_size > 1:
            accepted = ("alltoall",), "others sum up the experts of a rank first"
            kind = config.moe_token_dispatcher_type
            _require("moe_token_dispatcher_type", kind, *accepted, parts.OPTION)
    parts.split_size(config.num_attention_heads, parts.fixed.count)


def declare_experts_in_order(config: MLATransformerConfig) -> None:
    """Say that no MoE layer of this config's model leaves sums of experts to Megatron."""
    setattr(config, _IN_ORDER, True)


def _adds_experts_by_atomics(config: MLATransformerConfig) -> bool:
    """Whether results of more than two experts are added in any order; two give the same sum."""
    several = bool(config.num_moe_experts) and config.moe_router_topk > 2
    several = several and not getattr(config, _IN_ORDER, False)
    in_order = config.moe_permute_fusion or torch.are_deterministic_algorithms_enabled()
    return several and not in_order


def _require(
    name: str, value: Any, accepted: tuple, reason: str, option: str = "batch_invariant=True"
) -> None:
    if value not in accepted:
        choices = " or ".join(map(repr, accepted))
        raise ValueError(f"{option} does not go with {name}={value!r}: {reason}; use {choices}")
