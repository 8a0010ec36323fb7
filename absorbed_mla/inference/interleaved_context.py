"""Megatron's ``DynamicInferenceContext`` whose latents several ranks share."""

from __future__ import annotations

import copy

from megatron.core import parallel_state
from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.transformer.transformer_config import MLATransformerConfig

from absorbed_mla.inference.block_shares import require_shares
from absorbed_mla.inference.cache_ranks import CacheRanks
from absorbed_mla.inference.token_shares import TokenShares


class InterleavedContext(DynamicInferenceContext):
    """Holds as many times the tokens in the same memory as ranks share every layer.

    These are the tensor-parallel ranks, and under context parallelism all of those.

    Only the memory is other than the host's: ``cache_ranks.py`` says which part of a block a rank
    has. ``buffer_size_gb`` and ``paused_buffer_size_gb`` are what a rank allocates, as always.

    Args:
        model_config: With ``cache_mla_latents``.
        inference_config: Of the host.

    Attributes:
        cache_ranks: Those that share the latents.
        token_shares: How context-parallel ranks divide the new tokens of the layers that run; None:
            each computes all of them.

    Raises:
        ValueError: If the ranks cannot share a block.
    """

    token_shares: TokenShares | None = None

    def __init__(
        self, model_config: MLATransformerConfig, inference_config: InferenceConfig
    ) -> None:
        groups = inference_config.pg_collection
        if groups is None:
            self.cache_ranks = CacheRanks(
                parallel_state.get_tensor_and_context_parallel_group(),
                parallel_state.get_tensor_model_parallel_group(),
            )
        else:
            self.cache_ranks = CacheRanks(getattr(groups, "tp_cp", groups.tp), groups.tp)
        ranks = self.cache_ranks.size
        require_shares(ranks, inference_config.block_size_tokens)
        config = copy.copy(inference_config)
        # The host divides these by the bytes of a whole block.
        for name in ("buffer_size_gb", "paused_buffer_size_gb"):
            size = getattr(config, name)
            setattr(config, name, None if size is None else size * ranks)
        super().__init__(model_config, config)

    def _allocate_memory_buffer(self) -> None:
        whole = self.block_size_tokens
        self.block_size_tokens = whole // self.cache_ranks.size
        try:
            super()._allocate_memory_buffer()
        finally:
            self.block_size_tokens = whole
