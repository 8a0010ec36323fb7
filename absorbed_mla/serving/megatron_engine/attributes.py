"""Private attributes of Megatron's engine, context and controller, under names of this package.

The getters take the object and return its attribute, or a method that is then called; they are
written in C, and a step has no Python frame for them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from torch import Tensor

from absorbed_mla.log_once import log_once
from absorbed_mla.serving.megatron_engine.names import CONTROLLER, DETOKENIZE, NO_TEXTS

logger = logging.getLogger(__name__)

# Of ``DynamicInferenceEngine``.

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

# Of ``DynamicInferenceContext``.

# (request, first, last): blocks of the prefix cache that hold these blocks of its prompt, as far as
# there are any, and the hash of the last one.
find_cached_blocks = attrgetter("_find_kv_match_count")
# The memory of all tables that the device has, uint8 [bytes], and what is copied to it.
device_tables = attrgetter("gpu_view._buf")
staged_tables = attrgetter("_cpu_bookkeeping_buf")
# The tables in host memory that are copied, by names of this package, with Megatron's: a number for
# each row, but one more for sums, and several for blocks.
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

# Of ``TextGenerationController``.

# The sampler.
sampler_of = attrgetter("_sampling")
# Tokens that the last step has sampled, by row: int64 [max_requests] on the device.
sampled_tokens = attrgetter("_sampled_tokens_cuda")
# Logits of the last step, [1, T, vocabulary]; with ``materialize_only_last_token_logits`` T are the
# rows.
logits_of_step = attrgetter("_all_logits_cuda")
# (record_bookkeeping_done_event=True): prepare the tables of the next step, and send them to the
# device. Without the event, those who change them would wait for the device.
prepare_step = attrgetter("_dynamic_step_context_init")
# (input_ids, position_ids): run the model on a step's tokens [1, T]; keeps the logits.
run_model = attrgetter("_dynamic_step_forward_logits")
# (): sample a token for each row, by the sampler.
sample = attrgetter("_dynamic_step_sample_logits")
# (): end, pause and evict requests of the context after a step; returns what it reports.
update_context = attrgetter("_dynamic_step_context_bookkeeping")


def prefill_tokens(engine: Any) -> tuple[int, int]:
    """Tokens of prompts that were computed, and that the prefix cache had, since it was reset.

    Both are 0 without a prefix cache, and before Megatron 0.19.
    """
    names = "_prefill_tokens_computed", "_prefill_tokens_skipped"
    computed, skipped = (int(getattr(engine, name, 0)) for name in names)
    return computed, skipped


def log_probs_of_step(controller: TextGenerationController) -> dict[str, Any]:
    """What Megatron reports of the step's log-probabilities: of its tokens, and the largest ones.

    Returns:
        By Megatron's names, each None if no request asks for it.
    """
    found: dict[str, Any] = {"log_probs": None, "top_n_logprobs": None}
    wanted, wanted_top = controller._dynamic_step_log_probs_bookkeeping()
    if wanted or wanted_top:
        found["log_probs"], scores = controller._dynamic_step_calculate_log_probs()
        if wanted_top:
            top = controller._dynamic_step_calculate_top_n_logprobs(scores)
            found["top_n_logprobs"] = top
    return found


def swap_rows(context: Any, row: int, other: int, tokens: Sequence[Tensor | None]) -> None:
    """Let the requests of two rows have each other's.

    Args:
        tokens: By row, those of the next step and, if there are any, drafts behind them.
    """
    if row != other:
        swap = context._swap_book_keeping_tensors
        swap(torch.tensor([row]), torch.tensor([other]), *tokens)


def make_no_texts(controller: TextGenerationController) -> None:
    """Have Megatron make no text of a request that has ended: nobody reads it."""
    if missing := NO_TEXTS.missing({CONTROLLER: controller}):
        log_once(logger, "Megatron makes texts of requests that have ended", missing)
    else:
        DETOKENIZE.replace(controller, _no_text)


def _no_text(*_: Any, **__: Any) -> str:
    return ""
