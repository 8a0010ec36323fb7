"""Private attributes of Megatron's ``DynamicInferenceEngine``, under names of this package.

The getters take the engine and return its attribute, or a method that is then called; they are
written in C, and a step has no Python frame for them.
"""

from __future__ import annotations

from operator import attrgetter

# (request): queue it, without the copies of Megatron's ``add_request``.
queue_request = attrgetter("_add_request")
# (request): whether Megatron's scheduler would add it, or a part of it, to a step now.
can_schedule_chunk = attrgetter("_can_schedule_chunked_prefill")
# (request, record_cg_wait=False): the same, of an engine without chunked prefill.
can_schedule_prompt = attrgetter("_can_schedule_non_chunked_prefill")
# (): whether Megatron's scheduler lets requests wait for a step that has a CUDA graph.
admits_by_cuda_graph = attrgetter("_cg_admission_gating_active")
# (coroutine): run it to its end; returns what it does.
run_coroutine = attrgetter("_run_coroutine_sync")
# (request): whether its newest tokens are one of its stop words, and how many were removed.
check_stop_words = attrgetter("_check_stop_words_for_request_post_append")
# Since the engine was reset: blocks that the prefix cache had, and tokens of MTP layers by position
# among the drafts of a step, int64 tensors.
prefix_blocks_matched = attrgetter("_prefix_cache_blocks_matched")
tokens_drafted = attrgetter("_spec_tokens_proposed_per_pos")
tokens_accepted = attrgetter("_spec_tokens_accepted_per_pos")
# The engine's counters of the prefix cache, and the context's, which Megatron adds to them at the
# end of a step.
PREFIX_COUNTERS = {
    "_prefix_cache_hits": "prefix_cache_hits",
    "_prefix_cache_blocks_matched": "prefix_cache_blocks_matched",
    "_prefill_tokens_computed": "prefix_cache_prefill_computed_tokens",
    "_prefill_tokens_skipped": "prefix_cache_prefill_skipped_tokens",
}
