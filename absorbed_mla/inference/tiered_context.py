"""Megatron's ``DynamicInferenceContext`` with more blocks than the device has memory for."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from absorbed_mla.inference.block_tiers import STAGED_BLOCKS, BlockTiers


class TieredContext(DynamicInferenceContext):
    """Its scheduler, allocator and prefix cache count all blocks; some are in host memory.

    Args:
        model_config: With ``cache_mla_latents``.
        inference_config: ``buffer_size_gb`` is that of all blocks.
        host_blocks: How many of them are in host memory.

    Attributes:
        tiers: Where the blocks are.
    """

    tiers: BlockTiers

    def __init__(
        self,
        model_config: MLATransformerConfig,
        inference_config: InferenceConfig,
        host_blocks: int,
    ) -> None:
        self._host_blocks = host_blocks
        super().__init__(model_config, inference_config)

    def _allocate_memory_buffer(self) -> None:
        allocator = self.kv_block_allocator
        self.tiers = BlockTiers(
            layers=self.num_attention_layers,
            device_blocks=allocator.total_count - self._host_blocks,
            host_blocks=self._host_blocks,
            block=(self.block_size_tokens, self.kv_reduced_dim),
            dtype=self.params_dtype,
            device=torch.empty(0, device=torch.cuda.current_device()).device,
            staged=max(STAGED_BLOCKS, self.max_requests),
        )
        # What stays on the device.
        self.memory_buffer = self.tiers.resident
        allocate = allocator.allocate_memory_blocks

        def allocate_empty(num_blocks: int) -> Tensor | None:
            blocks = allocate(num_blocks)
            if blocks is not None:
                self.tiers.allocated(blocks)
            return blocks

        allocator.allocate_memory_blocks = allocate_empty

    def initialize_attention_state(self, **options: Any) -> Any:
        """As Megatron's; then the step's blocks get their places."""
        found = super().initialize_attention_state(**options)
        active = slice(self.paused_request_count, self.total_request_count)
        keys = self.request_kv_length_offsets[active] + self.request_query_lengths[active]
        allocator = self.kv_block_allocator
        self.tiers.begin_step(
            self.request_to_kv_block_ids[active],
            -(-keys // self.block_size_tokens),
            self.token_to_block_idx[: self.padded_active_token_count].clone(),
            allocator.block_bag[: allocator.total_avail],
            self.padded_active_request_count,
        )
        return found
