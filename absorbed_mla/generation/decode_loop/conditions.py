"""When steps can run without Megatron's scheduler, or with nothing of it but its admission."""

from __future__ import annotations

from megatron.core.inference.config import AsyncScheduleMode
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.engines.dynamic_engine import EngineState

from absorbed_mla.inference.tiered_context import TieredContext

# Of Megatron 0.19; where a later one has other names, its own steps run.
_HOST = (
    "_can_schedule_chunked_prefill",
    "_can_schedule_non_chunked_prefill",
    "_cg_admission_gating_active",
    "_prefill_tokens_computed",
    "_prefill_tokens_skipped",
    "_prefix_cache_blocks_matched",
    "_prefix_cache_hits",
    "schedule_waiting_requests",
)
_CONTEXT = (
    "_bookkeeping_h2d_done_event",
    "_cpu_bookkeeping_buf",
    "_cpu_mha_block_table",
    "_cpu_mha_cu_kv_seq_lengths",
    "_cpu_mha_cu_query_seq_lengths",
    "_cpu_mha_kv_seq_lengths",
    "_cpu_mha_query_lengths",
    "_staging_real_token_count",
    "_staging_request_in_prefill_status",
    "_staging_request_kv_length_offsets",
    "_staging_request_query_lengths",
    "active_request_metadata",
    "cuda_graph_batch_dimensions_list",
    "prefix_cache_lru_clock",
)
_ALLOCATOR = ("active_count", "total_avail", "enable_prefix_caching")
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
)


def why_never(host: DynamicInferenceEngine) -> str:
    """Why an engine runs all steps by Megatron's scheduler, or ``""``.

    Drafts, blocks in host memory and Megatron's asynchronous scheduling change more in a step than
    a token; its logs, events and records of routing are written by its own steps.
    """
    context, controller = host.context, host.controller
    config = context.config
    conditions = {
        "it drafts tokens": host.num_speculative_tokens > 0,
        "its cache is partly in host memory": isinstance(context, TieredContext),
        "its model is a hybrid one": context.is_hybrid_model,
        "async_sched_mode is not legacy": config.async_sched_mode != AsyncScheduleMode.LEGACY,
        "experts' routing is recorded": context.moe_enable_routing_replay,
        "events of tokens are recorded": host.track_generated_token_events,
        "steps are logged": host.logging_step_interval > 0,
        "this Megatron has other tables": not (
            all(hasattr(host, name) for name in _HOST)
            and all(hasattr(context, name) for name in _CONTEXT)
            and all(hasattr(context.kv_block_allocator, name) for name in _ALLOCATOR)
            and all(hasattr(controller, name) for name in _CONTROLLER)
        ),
    }
    return next((reason for reason, holds in conditions.items() if holds), "")


def runs_here(host: DynamicInferenceEngine) -> bool:
    """Whether all requests of the context run, each with its whole prompt, and none has failed.

    Requests that wait are not looked at, see ``admissions.py``.
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
