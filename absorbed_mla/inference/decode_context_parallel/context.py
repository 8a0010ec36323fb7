"""Megatron's ``DynamicInferenceContext`` under decode context parallelism."""

from __future__ import annotations

import copy
from functools import partial

from megatron.core import parallel_state
from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.transformer.transformer_config import MLATransformerConfig

from absorbed_mla.inference.decode_context_parallel.layout import CacheShares
from absorbed_mla.inference.decode_context_parallel.support import require_shares
from absorbed_mla.megatron_names import ALLOCATE_MEMORY, CONTEXT, DECODE_CONTEXT_PARALLEL


def decode_context_parallel_context(
    model_config: MLATransformerConfig, inference_config: InferenceConfig
) -> DynamicInferenceContext:
    """A context that holds as many times the tokens in the same memory as ranks share every layer.

    These are the tensor-parallel ranks, and under context parallelism all of those.

    Only the memory is other than Megatron's: ``layout.py`` says which part of a block a rank
    has. ``buffer_size_gb`` and ``paused_buffer_size_gb`` are what a rank allocates, as always. It
    is of Megatron's own class, because Megatron captures CUDA graphs with no other.

    Args:
        model_config: With ``cache_mla_latents``.

    Returns:
        The context. It has two attributes more: ``cache_ranks``, those that share the latents, and
        ``token_shares``, how context-parallel ranks divide the new tokens of the layers that run
        (None: each computes all of them).

    Raises:
        ValueError: If the ranks cannot share a block, or this release of Megatron allocates memory
            in another way.
    """
    DECODE_CONTEXT_PARALLEL.require({CONTEXT: DynamicInferenceContext})
    ranks = _cache_ranks(inference_config)
    require_shares(ranks.size, inference_config.block_size_tokens)
    config = copy.copy(inference_config)
    # Megatron divides these by the bytes of a whole block.
    for name in ("buffer_size_gb", "paused_buffer_size_gb"):
        size = getattr(config, name)
        setattr(config, name, None if size is None else size * ranks.size)
    context = DynamicInferenceContext.__new__(DynamicInferenceContext)
    # Before it allocates, in its constructor and when it resumes.
    ALLOCATE_MEMORY.replace(context, partial(_allocate_part, context))
    context.cache_ranks, context.token_shares = ranks, None
    context.__init__(model_config, config)  # type: ignore[misc]
    return context


def _cache_ranks(inference_config: InferenceConfig) -> CacheShares:
    groups = inference_config.pg_collection
    if groups is not None:
        return CacheShares(getattr(groups, "tp_cp", groups.tp), groups.tp)
    return CacheShares(
        parallel_state.get_tensor_and_context_parallel_group(),
        parallel_state.get_tensor_model_parallel_group(),
    )


def _allocate_part(context: DynamicInferenceContext) -> None:
    """Allocate this rank's part of every block."""
    whole = context.block_size_tokens
    context.block_size_tokens = whole // context.cache_ranks.size
    try:
        ALLOCATE_MEMORY.of(DynamicInferenceContext)(context)
    finally:
        context.block_size_tokens = whole
