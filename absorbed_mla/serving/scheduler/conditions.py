"""When steps can run without Megatron's scheduler, or with nothing of it but its admission."""

from __future__ import annotations

from megatron.core.inference.config import AsyncScheduleMode
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.engines.dynamic_engine import EngineState

from absorbed_mla.inference.kv_offload.context import OffloadingContext
from absorbed_mla.inference.megatron_names import missing_name
from absorbed_mla.serving.scheduler.input_batch import TABLES

# Of Megatron 0.19; where a later one has other names, its own steps run.
_HOST = (
    "_can_schedule_chunked_prefill",
    "_can_schedule_non_chunked_prefill",
    "_cg_admission_gating_active",
    "_check_stop_words_for_request_post_append",
    "_prefill_tokens_computed",
    "_prefill_tokens_skipped",
    "_prefix_cache_blocks_matched",
    "_prefix_cache_hits",
    "_run_coroutine_sync",
    "async_bookkeep",
    "enable_chunked_prefill",
    "failed_request_ids",
    "finished_request_count",
    "get_request",
    "requests",
    "schedule_waiting_requests",
    "state",
    "stop_word_finished_request_ids",
    "waiting_request_ids",
)
_CONTEXT = (
    *TABLES,
    "_bookkeeping_h2d_done_event",
    "_cpu_bookkeeping_buf",
    "active_attn_metadata",
    "active_request_metadata",
    "batch_dimensions",
    "calculate_log_probs_tensors",
    "cuda_graph_batch_dimensions_list",
    "current_input_and_position_ids",
    "gpu_view",
    "num_prefill_requests",
    "padded_active_request_count",
    "padded_active_token_count",
    "padded_batch_dimensions",
    "prefix_cache_lru_clock",
    "release_memory_blocks_from_request_indexes",
    "request_metadata",
    "round_up_tokens",
    "step_count",
    "update_requests",
    "using_cuda_graph_this_step",
)
_VIEW = ("_buf", "mha_block_table", "token_to_input_ids")
_ALLOCATOR = (
    "active_count",
    "allocate_memory_blocks",
    "dummy_block_idx",
    "enable_prefix_caching",
    "is_memory_available",
)
_CONTROLLER = (
    "_all_logits_cuda",
    "_dynamic_step_calculate_log_probs",
    "_dynamic_step_calculate_top_n_logprobs",
    "_dynamic_step_context_bookkeeping",
    "_dynamic_step_context_init",
    "_dynamic_step_forward_logits",
    "_dynamic_step_log_probs_bookkeeping",
    "_dynamic_step_sample_logits",
    "_sampled_tokens_cuda",
    "_sampling",
)


def _missing(host: DynamicInferenceEngine) -> str:
    """The name that the loop uses and this Megatron has not, or ``""``."""
    context = host.context
    return (
        missing_name(host, _HOST)
        or missing_name(context, _CONTEXT)
        or missing_name(context.kv_block_allocator, _ALLOCATOR)
        or missing_name(context.gpu_view, _VIEW)
        or missing_name(host.controller, _CONTROLLER)
    )


def why_never(host: DynamicInferenceEngine) -> str:
    """Why an engine runs all steps by Megatron's scheduler, or ``""``.

    Drafts, blocks in host memory and Megatron's asynchronous scheduling change more in a step than
    a token; its logs, events and records of routing are written by its own steps.
    """
    context, config = host.context, host.context.config
    conditions = {
        "it drafts tokens": host.num_speculative_tokens > 0,
        "its cache is partly in host memory": isinstance(context, OffloadingContext),
        "its model is a hybrid one": context.is_hybrid_model,
        "async_sched_mode is not legacy": config.async_sched_mode != AsyncScheduleMode.LEGACY,
        "experts' routing is recorded": context.moe_enable_routing_replay,
        "events of tokens are recorded": host.track_generated_token_events,
        "steps are logged": host.logging_step_interval > 0,
    }
    return _missing(host) or next((reason for reason, holds in conditions.items() if holds), "")


def runs_here(host: DynamicInferenceEngine) -> bool:
    """Whether all requests of the context run, each with its whole prompt, and none has failed.

    Requests that wait are not looked at, see ``waiting_queue.py``.
    """
    context = host.context
    return (
        context.paused_request_count == 0
        and context.chunked_prefill_request_id == -1
        and not host.failed_request_ids
        and host.state == EngineState.RUNNING
    )


def may_admit(host: DynamicInferenceEngine) -> bool:
    """Whether Megatron's scheduler may add the first request that waits to the next step.

    If not, it looks at no other. That stays so until a running request ends, since nothing else
    gives back blocks or rows.
    """
    request = host.get_request(host.waiting_request_ids[0])
    if host.enable_chunked_prefill:
        return host._can_schedule_chunked_prefill(request)
    return host._can_schedule_non_chunked_prefill(request, record_cg_wait=False)
