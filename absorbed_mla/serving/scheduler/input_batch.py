"""The input batch: the tables of a step's requests in Megatron's context, from step to step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from megatron.core.inference.batch_dimensions_utils import (
    CUDAGraphBatchDimensionBuilder,
    InferenceBatchDimensions,
)
from megatron.core.inference.contexts import DynamicInferenceContext

from absorbed_mla.serving.megatron_engine.attributes import (
    STAGED_TABLES,
    device_tables,
    staged_tables,
)

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
    "token_to_request_idx",
    "token_to_block_idx",
    "token_to_position_in_request",
    "token_to_local_position_within_kv_block",
)
# What the device gets of rows, beside what is for tokens.
_STAGED = (
    "staged_temperature",
    "staged_top_k",
    "staged_top_p",
    "staged_kv_length_offsets",
    "mha_kv_lengths",
    "mha_cu_kv_lengths",
    "mha_block_table",
)
# The same of every row, and 0 in rows that are padding.
_OF_ROWS = ("staged_in_prefill", "staged_query_lengths", "mha_query_lengths")
_SUMS, _COUNT = "mha_cu_query_lengths", "staged_token_count"
# All of them, by their names here.
_TABLES = (*_OF_REQUESTS, *_OF_TOKENS, *_STAGED, *_OF_ROWS, _SUMS, _COUNT)


class InputBatch:
    """One row per request of a step: its tokens, positions and blocks, in Megatron's context.

    It does to a context what Megatron's ``update_requests`` and ``initialize_attention_state`` do,
    in the same order of rows, with the same blocks, for steps after which no request is paused or
    evicted; all may finish. The tables are in CPU memory; NumPy changes them in place, in a tenth
    of the time. Made when Megatron has prepared a step, which computes whole prompts or none; there
    are no paused requests. The steps that follow are decode steps.

    Attributes:
        count: Rows of the step.
    """

    def __init__(self, context: DynamicInferenceContext) -> None:
        self._context = context
        self.count = context.total_request_count
        self._decodes = context.num_prefill_requests == 0
        self._padded = context.padded_active_request_count
        self._of = {
            name: getattr(context, STAGED_TABLES.get(name, name)).numpy() for name in _TABLES
        }
        kinds = (context.request_metadata, context.active_request_metadata)
        self._metadata = [{k: v.numpy() for k, v in kind.items()} for kind in kinds]
        view = context.gpu_view
        self._table_start = view.mha_block_table.data_ptr() - device_tables(context).data_ptr()
        self._table_changed = False

    def at_max_length(self) -> set[int]:
        """Rows whose requests are as long as they may be with the token that the step samples."""
        n, of = self.count, self._of
        lengths = of["request_kv_length_offsets"][:n] + of["request_query_lengths"][:n] + 1
        [rows] = (lengths >= of["request_output_lengths"][:n]).nonzero()
        return set(rows.tolist())

    def metadata(self, name: str) -> _Array:
        """Megatron's metadata of the requests by name; not a copy."""
        return self._metadata[1][name][: self.count]

    @property
    def reports_more(self) -> bool:
        """Whether requests want log-probabilities of other tokens than those sampled."""
        metadata = self.metadata
        if metadata("top_n_logprobs").any():
            return True
        wanted = metadata("return_log_probs").any()
        return bool(wanted and not metadata("skip_prompt_log_probs").all())

    def numbers(self) -> list[int]:
        """The requests' numbers."""
        return self._of["request_ids"][: self.count].tolist()

    def positions(self) -> list[int]:
        """Positions of the tokens that the step samples."""
        of, n = self._of, self.count
        found = of["request_kv_length_offsets"][:n] + of["request_query_lengths"][:n]
        return found.tolist()

    def has_blocks(self, finished: Collection[int]) -> bool:
        """Whether :meth:`advance` can be called: requests that go on get the blocks they need.

        False where that is not certain: blocks of requests that finish are not counted as free.
        """
        kept = [row for row in range(self.count) if row not in finished]
        allocator, needed = self._context.kv_block_allocator, int(self._are_full()[kept].sum())
        if not needed:
            return True
        # Blocks that requests share are counted for each of them.
        used = self._of["request_kv_block_counts"][kept].sum()
        if used + needed > allocator.active_count and allocator.enable_prefix_caching:
            used = (allocator.block_ref_counts.numpy() > 0).sum()
        fits = used + needed <= allocator.active_count
        return bool(fits) and allocator.is_memory_available(needed)

    def has_size_for(self, count: int) -> bool:
        """Whether Megatron would pad a decode step of so many rows to the size of this step."""
        context = self._context
        if not self._decodes:
            return False
        sizes = InferenceBatchDimensions(count, 0, count)
        # Ranks that run the same steps find the same graph, and need not ask each other.
        graph = CUDAGraphBatchDimensionBuilder.match_graph_config(
            sizes, context.cuda_graph_batch_dimensions_list, match_ep_token_counts=False
        )
        if graph is not None or context.using_cuda_graph_this_step():
            return graph == context.padded_batch_dimensions
        tokens = min(context.max_tokens, context.max_requests, context.round_up_tokens(count))
        return tokens == context.padded_active_token_count

    def advance(self, finished: Collection[int], tokens: Sequence[int] | None) -> list[int]:
        """Become the batch of the next step.

        Args:
            finished: Rows whose requests have no part in it; their blocks are released.
            tokens: That the step has sampled, by its rows. None: they are not known here; the next
                step's inputs are then the rows that they are sampled in.

        Returns:
            For each row of the next step, the row that it was.
        """
        order = self.remove(finished)
        self._end_prefill()
        self._allocate_blocks(order)
        self._append_tokens(order if tokens is None else [tokens[row] for row in order])
        return order

    def remove(self, finished: Collection[int]) -> list[int]:
        """Release blocks of rows; the last ones that go on take their places, as Megatron's do.

        Returns:
            As :meth:`advance`.
        """
        order, left = list(range(self.count)), self.count - len(finished)
        if not finished:
            return order
        context, rows = self._context, sorted(finished)
        context.release_memory_blocks_from_request_indexes(torch.tensor(rows))
        former = [row for row in range(left, self.count) if row not in finished]
        self._move(former, rows[: len(former)], order)
        self._of["request_to_kv_block_ids"][former] = -1
        self._pad(left)
        return order[:left]

    def copy_to_device(self) -> None:
        """Queue the copy of the step's tables; the device reads CPU memory until it has run."""
        context, of, n = self._context, self._of, self.count
        positions = of["request_kv_length_offsets"][:n]
        of["staged_kv_length_offsets"][:n] = positions
        lengths, sums = of["mha_kv_lengths"], of["mha_cu_kv_lengths"]
        lengths[:n] = positions + 1
        sums[1 : n + 1] = lengths[:n].cumsum()
        sums[n + 1 : self._padded + 1] = sums[n]
        if not context.using_cuda_graph_this_step():
            metadata = context.active_attn_metadata["mha_metadata"]
            metadata.state_data["max_seqlen_k"] = int(lengths[:n].max())
        end = self._table_start
        if self._table_changed:
            of["mha_block_table"][:n] = of["request_to_kv_block_ids"][:n]
            end += of["mha_block_table"][: self._padded].nbytes
            self._table_changed = False
        with torch.inference_mode():
            staged = staged_tables(context)[:end]
            device_tables(context)[:end].copy_(staged, non_blocking=True)

    def _pad(self, count: int) -> None:
        """Let the rows from ``count`` on be padding, and tell Megatron how many there are."""
        context, of, padding = self._context, self._of, slice(count, self.count)
        self.count = context.total_request_count = context.active_token_count = count
        context.batch_dimensions = InferenceBatchDimensions(count, 0, count)
        of["token_to_block_idx"][padding] = context.kv_block_allocator.dummy_block_idx
        of["token_to_local_position_within_kv_block"][padding] = 0
        of["token_to_position_in_request"][padding] = 0
        for name in (*_OF_ROWS, "staged_kv_length_offsets", "mha_kv_lengths"):
            of[name][padding] = 0
        of["mha_block_table"][padding] = -1
        of[_SUMS][count + 1 : self._padded + 1] = count
        of[_COUNT][0] = count
        self._table_changed = True

    def _end_prefill(self) -> None:
        """Let all rows be of requests that decode."""
        if self._context.num_prefill_requests:
            self._context.num_prefill_requests = 0
            self._of["request_in_prefill_status_tensor"][: self.count] = 0
            self._of["token_to_request_idx"][: self.count] = range(self.count)

    def _are_full(self) -> _Array:
        """By row, whether the request's next token needs a block."""
        offsets = self._of["request_last_kv_block_offset"][: self.count]
        return offsets >= self._context.block_size_tokens - 1

    def _allocate_blocks(self, order: list[int]) -> None:
        """Give full rows a block each; they become the first ones, as Megatron resumes them."""
        of = self._of
        [found] = self._are_full().nonzero()
        rows = found.tolist()
        needed = len(rows)
        if not needed:
            return
        behind = [row for row in rows if row >= needed]
        others = sorted(set(range(needed)) - set(rows))
        self._move(behind + others, others + behind, order)
        blocks = self._context.kv_block_allocator.allocate_memory_blocks(needed)
        assert blocks is not None, "has_blocks was asked"
        counts = of["request_kv_block_counts"][:needed]
        of["request_to_kv_block_ids"][range(needed), counts] = blocks.numpy()
        counts += 1
        of["request_last_kv_block_id"][:needed] = blocks.numpy()
        self._table_changed = True

    def _append_tokens(self, tokens: Sequence[int]) -> None:
        """Add a token to every request, which has room for it."""
        of, block = self._of, self._context.block_size_tokens
        rows = slice(0, self.count)
        self._context.active_token_count = self.count
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

    def _move(self, former: Sequence[int], places: Sequence[int], order: list[int]) -> None:
        """Move rows; the values at ``former`` are read before any is written."""
        if not former:
            return
        of = self._of
        for name in (*_OF_REQUESTS, *_STAGED[:3]):
            of[name][places] = of[name][former]
        for kind in self._metadata:
            for values in kind.values():
                values[places] = values[former]
        for place, row in zip(places, [order[row] for row in former]):
            order[place] = row
