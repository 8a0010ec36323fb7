"""What the package does to Megatron's ``DynamicInferenceContext`` beyond its documented calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.inference.inference_request import DynamicInferenceRequest
from torch import Tensor

# Tables in host memory of which the device gets a copy for each step: names of the package's,
# and of Megatron's. A number for each row, but for sums (one more) and blocks (several).
STAGED_TABLES = {
    "staged_temperature": "_staging_temperature",
    "staged_top_k": "_staging_top_k",
    "staged_top_p": "_staging_top_p",
    "staged_in_prefill": "_staging_request_in_prefill_status",
    "staged_query_lengths": "_staging_request_query_lengths",
    "staged_kv_length_offsets": "_staging_request_kv_length_offsets",
    "staged_token_count": "_staging_real_token_count",
    "mha_query_lengths": "_cpu_mha_query_lengths",
    "mha_cu_query_lengths": "_cpu_mha_cu_query_seq_lengths",
    "mha_kv_lengths": "_cpu_mha_kv_seq_lengths",
    "mha_cu_kv_lengths": "_cpu_mha_cu_kv_seq_lengths",
    "mha_block_table": "_cpu_mha_block_table",
}


def host_tables(context: DynamicInferenceContext, names: Sequence[str]) -> dict[str, Any]:
    """NumPy arrays of the context's tables in host memory, which share its memory.

    Args:
        context: Megatron's.
        names: Of :data:`STAGED_TABLES`, or of Megatron's context.
    """
    return {name: getattr(context, STAGED_TABLES.get(name, name)).numpy() for name in names}


def device_tables(context: DynamicInferenceContext) -> Tensor:
    """The memory of all tables that the device has, uint8 [bytes]."""
    return context.gpu_view._buf


def block_table_offset(context: DynamicInferenceContext) -> int:
    """Where the block table begins in :func:`device_tables`: behind all that is of tokens."""
    view = context.gpu_view
    return view.mha_block_table.data_ptr() - view._buf.data_ptr()


def send_tables(context: DynamicInferenceContext, num_bytes: int) -> None:
    """Copy the first bytes of the staged tables to the device, which reads host memory later."""
    with torch.inference_mode():
        staged = context._cpu_bookkeeping_buf[:num_bytes]
        context.gpu_view._buf[:num_bytes].copy_(staged, non_blocking=True)


def cached_blocks(context: DynamicInferenceContext, request: DynamicInferenceRequest) -> list[int]:
    """Blocks of the prefix cache that hold the beginning of a request's prompt."""
    hashes = request.precomputed_block_hashes
    blocks, _ = context._find_kv_match_count(request, 0, len(hashes))
    return blocks
