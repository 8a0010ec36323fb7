"""Attention over a cache."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

MUTATIONS = {
    "fp8_own_tokens_not_rounded": Mutation(
        "absorbed_mla/inference/row_groups.py",
        "own = kv if self.fp8 is None else self.fp8.rounded(kv)",
        "own = kv",
    ),
    "cache_written_one_late": Mutation(
        "absorbed_mla/inference/caches/static.py",
        "self.memory.write(self.offset, self.requests",
        "self.memory.write(self.offset + 1, self.requests",
    ),
    "decoded_at_position_zero": Mutation(
        "absorbed_mla/inference/caches/static.py",
        "torch.arange(self.offset, self.max_position, device=device)",
        "torch.arange(0, self.max_position - self.offset, device=device)",
    ),
    "context_chunk_dropped": Mutation(
        "absorbed_mla/inference/row_groups.py",
        "ranges, room = [], chunk_size",
        "return",
    ),
    "context_of_another_row": Mutation(
        "absorbed_mla/inference/row_groups.py",
        "part.gather(self.first_row + keys.row,",
        "part.gather(keys.row,",
    ),
    "segment_on_the_wrong_axis": Mutation(
        "absorbed_mla/inference/row_groups.py",
        "starts - first if first else starts",
        "starts",
    ),
    "offloaded_part_starts_at_zero": Mutation(
        "absorbed_mla/inference/latent_memory.py",
        "start += self.block_size",
        "start += 0",
    ),
    "rows_of_a_former_forward": Mutation(
        "absorbed_mla/inference/caches/dynamic.py",
        "or number != context.step_count",
        "or False",
    ),
    "gathered_keys_of_other_rows": Mutation(
        "absorbed_mla/inference/row_groups.py",
        'key = "gathered", self.first_row, causal, *ranges',
        'key = "gathered"',
    ),
    "cache_of_the_first_layer": Mutation(
        "absorbed_mla/inference/caches/dynamic.py",
        "self.steps(context, layer_number - offset, tokens, offset)",
        "self.steps(context, 1, tokens, offset)",
    ),
    "shared_cache_owner_of_a_token": Mutation(
        "absorbed_mla/inference/decode_context_parallel/layout.py",
        "(self.size - 1 - self.rank)) // self.size",
        "(self.size - 1)) // self.size",
    ),
    "shared_cache_writes_all_tokens": Mutation(
        "absorbed_mla/inference/decode_context_parallel/layout.py",
        "torch.where(own, block, unused)",
        "block",
    ),
    "shared_cache_gathered_from_rank_0": Mutation(
        "absorbed_mla/inference/decode_context_parallel/attention.py",
        ".roll(-(start % ranks.size), dims=0)",
        "",
    ),
    "shared_cache_memory": Mutation(
        "absorbed_mla/inference/decode_context_parallel/context.py",
        "context.block_size_tokens = whole // context.cache_ranks.size",
        "pass",
    ),
    "divided_prompt_tokens_by_rank": Mutation(
        "absorbed_mla/inference/prefill_context_parallel.py",
        "return parts.transpose(0, 1).flatten(0, 2)",
        "return parts.flatten(0, 2)",
    ),
    "divided_prompt_places_on_rank": Mutation(
        "absorbed_mla/inference/prefill_context_parallel.py",
        "here = before + first - own.start",
        "here = before",
    ),
    "divided_prompt_row_of_a_run": Mutation(
        "absorbed_mla/inference/row_groups.py",
        "yield QueryRun(row, first - start, place,",
        "yield QueryRun(row, 0, place,",
    ),
    "context_of_another_model": Mutation(
        "absorbed_mla/inference/caches/static.py",
        "if begun and last is not None and last() is not owner:",
        "if begun and last is None and last is not owner:",
    ),
    "staged_copy_waits_for_no_reader": Mutation(
        "absorbed_mla/inference/kv_offload/staging_buffers.py",
        "self._streams.await_free(buffer)",
        "pass",
    ),
    "staged_window_is_read_at_once": Mutation(
        "absorbed_mla/inference/kv_offload/staging_buffers.py",
        "self._streams.await_copied(self._taken)",
        "pass",
    ),
    "staged_copies_before_blocks_move": Mutation(
        "absorbed_mla/inference/kv_offload/staging_buffers.py", "self._streams.begin()", "pass"
    ),
}
