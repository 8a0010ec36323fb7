"""Megatron's ``DynamicInferenceContext`` with KV offload: more blocks than the device holds."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from absorbed_mla.inference.kv_offload.blocks import OffloadedBlocks
from absorbed_mla.inference.kv_offload.staging_buffers import NUM_BUFFERS
from absorbed_mla.megatron_names import (
    ALLOCATE_BLOCKS,
    ALLOCATE_MEMORY,
    ALLOCATOR,
    CONTEXT,
    KV_OFFLOAD,
    KV_OFFLOAD_MEMORY,
    KV_OFFLOAD_STEPS,
)

# Blocks of a staging buffer: 32,768 tokens, 36 MiB at DeepSeek-V3's widths.
STAGED_BLOCKS = 512
# All buffers take at most this share of the device's memory.
_SHARE = 1 / 64


class OffloadingContext(DynamicInferenceContext):
    """Its scheduler, allocator and prefix cache count all blocks; some are in host memory.

    Args:
        model_config: With ``cache_mla_latents``.
        inference_config: ``buffer_size_gb`` is that of all blocks.
        host_blocks: How many of them are in host memory.

    Raises:
        ValueError: If this release of Megatron lacks a name that is needed here.

    Attributes:
        tiers: Where the blocks are.
    """

    tiers: OffloadedBlocks

    def __init__(
        self,
        model_config: MLATransformerConfig,
        inference_config: InferenceConfig,
        host_blocks: int,
    ) -> None:
        KV_OFFLOAD.require({CONTEXT: DynamicInferenceContext})
        self._host_blocks = host_blocks
        ALLOCATE_MEMORY.replace(self, self._allocate_offloaded)
        super().__init__(model_config, inference_config)
        KV_OFFLOAD_STEPS.require({CONTEXT: self})

    def _allocate_offloaded(self) -> None:
        """Allocate blocks on the device and in host memory, in the place of Megatron's memory."""
        KV_OFFLOAD_MEMORY.require({CONTEXT: self})
        allocator = self.kv_block_allocator
        KV_OFFLOAD_MEMORY.require({ALLOCATOR: allocator})
        device = torch.empty(0, device=torch.cuda.current_device()).device
        block = self.block_size_tokens, self.kv_reduced_dim
        self.tiers = OffloadedBlocks(
            layers=self.num_attention_layers,
            device_blocks=allocator.total_count - self._host_blocks,
            host_blocks=self._host_blocks,
            block=block,
            dtype=self.params_dtype,
            device=device,
            staged=self._staged_blocks(device, math.prod(block) * self.params_dtype.itemsize),
        )
        # What stays on the device.
        self.memory_buffer = self.tiers.resident
        allocate = ALLOCATE_BLOCKS.of(allocator)

        def allocate_empty(num_blocks: int) -> Tensor | None:
            blocks = allocate(num_blocks)
            if blocks is not None:
                self.tiers.allocated(blocks)
            return blocks

        ALLOCATE_BLOCKS.replace(allocator, allocate_empty)

    def _staged_blocks(self, device: torch.device, block_bytes: int) -> int:
        """Blocks of a staging buffer: many, but no more than are there, and few of a small GPU."""
        most = STAGED_BLOCKS
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
            most = min(most, int(memory * _SHARE) // (NUM_BUFFERS * block_bytes))
        return min(max(most, self.max_requests), self._host_blocks)

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
