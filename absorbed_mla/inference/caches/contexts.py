"""Megatron's inference contexts, which keep what a model remembers between forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from absorbed_mla.inference.caches.dynamic import DynamicStep
from absorbed_mla.inference.caches.static import StaticStep
from absorbed_mla.inference.step import InferenceStep
from absorbed_mla.options import AbsorbedMLAOptions


def open_step(
    context: Any,
    layer_number: int,
    layer_offset: Callable[[], int],
    kv: Tensor,
    options: AbsorbedMLAOptions,
    owner: object,
) -> InferenceStep:
    """The cache of one layer for one forward.

    Args:
        context: A ``StaticInferenceContext`` or a ``DynamicInferenceContext``.
        layer_number: Of the layer in the model, from 1.
        layer_offset: Layers of the model before this pipeline stage.
        kv: Latents of the new tokens as the host gives them, [S, B, C + rope].
        options: Where latents are kept.
        owner: Something that lives as long as the layer, and is no other layer's.

    Raises:
        ValueError: If it is no such context, the new tokens do not fit into it, or it cannot hold
            latents, or holds those of another model.
    """
    if not hasattr(context, "is_static_batching"):
        raise ValueError(
            "inference_context must be a StaticInferenceContext or a DynamicInferenceContext, got "
            f"{type(context).__name__}"
        )
    tokens, batch, _ = kv.shape
    if context.is_static_batching():
        return StaticStep(context, layer_number, kv, options, owner)
    if options.latent_cache_tokens is not None:
        raise ValueError(
            "latent_cache_tokens needs a StaticInferenceContext; DynamicInferenceContext has "
            "InferenceConfig.unified_memory_level for caches larger than the device's memory"
        )
    if batch != 1:
        raise ValueError(f"DynamicInferenceContext packs tokens: batch must be 1, got {batch}")
    return DynamicStep(context, layer_number - layer_offset(), tokens)
