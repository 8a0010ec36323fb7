"""The index-key cache of sparse attention, in the blocks of a ``DynamicInferenceContext``.

A block of tokens has the same number in both memories, so the context's scheduler, allocator and
prefix cache, which deal with numbers of blocks, hold for the index keys as they are.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core.inference.config import KVCacheManagementMode
from torch import Tensor

from absorbed_mla.megatron_names import (
    ALLOCATE_MEMORY,
    CONTEXT,
    INDEX_KEYS,
    is_kept_by_memory_saver,
    keep_offloaded,
)

# Attribute of the context: [layers with an indexer, blocks, block_size, Di].
_NAME = "index_keys"


def index_keys(context: Any, layer: int, num_layers: int, like: Tensor) -> Tensor:
    """The memory of one layer, [blocks, block_size, Di], allocated for all layers on first use.

    Args:
        layer: Which of the layers of this pipeline stage that have an indexer, from 0.
        num_layers: Number of those.
        like: Index keys, for their width, dtype and device.

    Raises:
        ValueError: If it cannot be allocated now, or is another model's.
    """
    if not hasattr(context, _NAME):
        allocate_index_keys(context, num_layers, like.shape[-1], like.dtype, like.device)
    memory: Tensor = getattr(context, _NAME)
    found = (len(memory), memory.shape[-1], memory.dtype, memory.device)
    expected = (num_layers, like.shape[-1], like.dtype, like.device)
    if found != expected:
        raise ValueError(
            f"the inference context holds index keys of (layers, width, dtype, device) {found}, "
            f"this model's are {expected}; use one context per model"
        )
    return memory[layer]


def allocate_index_keys(
    context: Any, num_layers: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Give a context memory for index keys, which is freed, offloaded and made again with its own.

    Args:
        context: Megatron's, with its blocks allocated.
        num_layers: Layers of this pipeline stage that have an indexer.
        width: Di.

    Raises:
        ValueError: While a CUDA graph is captured, if memory savers keep the latents, or if this
            version of Megatron allocates them in another way.
    """
    INDEX_KEYS.require({CONTEXT: context})
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "a DynamicInferenceContext needs memory for index keys before a CUDA graph is "
            "captured: run one forward without graphs first, or call "
            "absorbed_mla.inference.index_keys.allocate_index_keys"
        )
    if is_kept_by_memory_saver(context):
        raise ValueError(
            "static_kv_memory_pointers=True with torch_memory_saver does not keep index keys; use "
            "kv_cache_management_mode='persist' or unified_memory_level=1"
        )
    shape = (num_layers, len(context.memory_buffer[0]), context.block_size_tokens, width)

    def allocate() -> None:
        memory = torch.empty(shape, dtype=dtype, device=device)
        setattr(context, _NAME, memory)
        if context.kv_cache_management_mode == KVCacheManagementMode.OFFLOAD:
            copy = torch.empty(shape, dtype=dtype, pin_memory=memory.is_cuda)
            keep_offloaded(context, _NAME, copy)

    # Megatron makes its memory again after it was freed.
    of_latents = ALLOCATE_MEMORY.of(context)

    def allocate_both() -> None:
        of_latents()
        allocate()

    ALLOCATE_MEMORY.replace(context, allocate_both)
    unified = context.unified_memory_level != 0
    pool = torch.cuda.use_mem_pool(context.unified_memory_mempool) if unified else None
    # As Megatron's, no tensor of inference mode, which nothing outside of it may write to.
    with pool or contextlib.nullcontext(), torch.inference_mode(False):
        allocate()
