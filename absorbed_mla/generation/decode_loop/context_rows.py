"""The numbers of a decode step's requests in Megatron's context, from one step to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.inference.contexts import DynamicInferenceContext

# NumPy's, made by tensors: the package does not depend on NumPy itself.
_Array = Any

# A number or more for each request, in the order of rows.
_OF_REQUESTS = (
    "request_ids",
    "request_in_prefill_status_tensor",
    "request_query_lengths",
    "request_output_lengths",
    "request_kv_length_offsets",
    "request_kv_block_counts",
    "request_last_kv_block_id",
    "request_last_kv_block_offset",
    "request_to_kv_block_ids",
)
_OF_TOKENS = (
    "token_to_input_ids",
    "token_to_pos_ids",
    "token_to_block_idx",
    "token_to_position_in_request",
    "token_to_local_position_within_kv_block",
)
# What the device gets of rows, beside what is for tokens.
_STAGED = (
    "_staging_temperature",
    "_staging_top_k",
    "_staging_top_p",
    "_staging_request_kv_length_offsets",
    "_cpu_mha_kv_seq_lengths",
    "_cpu_mha_cu_kv_seq_lengths",
    "_cpu_mha_block_table",
)


class ContextRows:
    """Does to a context what Megatron's ``update_requests`` and ``initialize_attention_state`` do.

    In the same order of rows, with the same blocks, for steps in which no request ends, pauses or
    is evicted. Its tables are in host memory; NumPy changes them in place, in a tenth of the time.
    Made when Megatron has prepared a decode step; there are no paused requests.

    Args:
        context: Megatron's, initialized for the step.

    Attributes:
        count: Rows of the step.
    """

    def __init__(self, context: DynamicInferenceContext) -> None:
        self._context = context
        self.count = context.total_request_count
        self._padded = context.padded_active_request_count
        names = (*_OF_REQUESTS, *_OF_TOKENS, *_STAGED)
        self._of = {name: getattr(context, name).numpy() for name in names}
        kinds = (context.request_metadata, context.active_request_metadata)
        self._metadata = [{k: v.numpy() for k, v in kind.items()} for kind in kinds]
        view = context.gpu_view
        self._table_start = view.mha_block_table.data_ptr() - view._buf.data_ptr()
        self._table_changed = False

    def has_ended(self, tokens: _Array) -> _Array:
        """Which requests end with these tokens, by Megatron's rules for all but stop words."""
        n, of = self.count, self._of
        lengths = of["request_kv_length_offsets"][:n] + of["request_query_lengths"][:n] + 1
        stops = self._metadata[1]["termination_id"][:n]
        return (tokens == stops) | (lengths >= of["request_output_lengths"][:n])

    def wants(self, name: str) -> _Array:
        """Megatron's metadata of the requests by name."""
        return self._metadata[1][name][: self.count]

    def numbers(self) -> list[int]:
        """The requests' numbers."""
        return self._of["request_ids"][: self.count].tolist()

    def positions(self) -> list[int]:
        """Positions of the tokens that the step draws."""
        found = self._of["request_kv_length_offsets"][: self.count] + 1
        return found.tolist()

    def full(self) -> list[int]:
        """Rows whose next token needs a block, in order."""
        offsets = self._of["request_last_kv_block_offset"][: self.count]
        [rows] = (offsets >= self._context.block_size_tokens - 1).nonzero()
        return rows.tolist()

    def has_blocks(self, rows: Sequence[int]) -> bool:
        """Whether Megatron would give each of these rows a block at once.

        False where that is not certain: blocks that requests share are counted once by Megatron.
        """
        allocator, needed = self._context.kv_block_allocator, len(rows)
        counts = self._of["request_kv_block_counts"][: self.count]
        if not needed:
            return True
        if allocator.total_avail < needed:
            return False
        if counts.sum() + needed <= allocator.active_count:
            return True
        if not allocator.enable_prefix_caching:
            return False
        used = (allocator.block_ref_counts.numpy() > 0).sum()
        return bool(used + counts[rows].sum() + needed <= allocator.active_count)

    def extend(self, rows: Sequence[int]) -> tuple[list[int], list[int]] | None:
        """Give each of these rows a block; they become the first ones, as Megatron resumes them.

        Returns:
            Rows that have moved: where they were, and where they are. None: nowhere.
        """
        needed = len(rows)
        if not needed:
            return None
        behind = [row for row in rows if row >= needed]
        others = sorted(set(range(needed)) - set(rows))
        former, places = behind + others, others + behind
        if former:
            self._move(former, places)
        blocks = self._context.kv_block_allocator.allocate_memory_blocks(needed)
        assert blocks is not None, "has_blocks was asked"
        of, counts = self._of, self._of["request_kv_block_counts"][:needed]
        of["request_to_kv_block_ids"][range(needed), counts] = blocks.numpy()
        counts += 1
        of["request_last_kv_block_id"][:needed] = blocks.numpy()
        self._table_changed = True
        return (former, places) if former else None

    def advance(self, tokens: _Array) -> None:
        """Add a token to every request, which has room for it."""
        of, block = self._of, self._context.block_size_tokens
        rows = slice(0, self.count)
        positions = of["request_kv_length_offsets"][rows]
        positions += of["request_query_lengths"][rows]
        of["request_query_lengths"][rows] = 1
        offsets = of["request_last_kv_block_offset"]
        offsets[rows] = (offsets[rows] + 1) % block
        of["token_to_input_ids"][rows] = tokens
        of["token_to_pos_ids"][rows] = positions
        of["token_to_position_in_request"][rows] = positions
        of["token_to_local_position_within_kv_block"][rows] = positions % block
        of["token_to_block_idx"][rows] = of["request_last_kv_block_id"][rows]

    def publish(self) -> None:
        """Send the step's numbers to the device."""
        context, of, n = self._context, self._of, self.count
        positions = of["request_kv_length_offsets"][:n]
        of["_staging_request_kv_length_offsets"][:n] = positions
        lengths, sums = of["_cpu_mha_kv_seq_lengths"], of["_cpu_mha_cu_kv_seq_lengths"]
        lengths[:n] = positions + 1
        sums[1 : n + 1] = lengths[:n].cumsum()
        sums[n + 1 : self._padded + 1] = sums[n]
        if not context.using_cuda_graph_this_step():
            metadata = context.active_attn_metadata["mha_metadata"]
            metadata.state_data["max_seqlen_k"] = metadata._max_seqlen_k = int(lengths[:n].max())
        end = self._table_start
        if self._table_changed:
            of["_cpu_mha_block_table"][:n] = of["request_to_kv_block_ids"][:n]
            end += of["_cpu_mha_block_table"][: self._padded].nbytes
            self._table_changed = False
        with torch.inference_mode():
            buffer = context._cpu_bookkeeping_buf[:end]
            context.gpu_view._buf[:end].copy_(buffer, non_blocking=True)

    def _move(self, former: Sequence[int], places: Sequence[int]) -> None:
        """Move rows; the values at ``former`` are read before any is written."""
        of = self._of
        for name in (*_OF_REQUESTS, *_STAGED[:3]):
            of[name][places] = of[name][former]
        for kind in self._metadata:
            for values in kind.values():
                values[places] = values[former]
