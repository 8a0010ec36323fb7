"""When the overlap scheduler can run the steps of an engine, and Megatron's runs all of them."""

from __future__ import annotations

import logging

import torch
from megatron.core import parallel_state
from megatron.core.inference.config import AsyncScheduleMode
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.models.gpt import GPTModel

from absorbed_mla.inference.kv_offload.context import OffloadingContext
from absorbed_mla.inference.megatron_names import missing_name
from absorbed_mla.log_once import log_once
from absorbed_mla.serving.data_parallel_attention.model import exchange_of
from absorbed_mla.serving.engine_options import EngineOptions
from absorbed_mla.serving.sampling.sampler import RequestSampler
from absorbed_mla.serving.scheduler.input_batch import TABLES
from absorbed_mla.serving.scheduler.overlap_scheduler import OverlapScheduler

logger = logging.getLogger(__name__)

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
    """The name that the scheduler uses and this Megatron has not, or ``""``."""
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


def overlap_scheduler(
    host: DynamicInferenceEngine,
    model: GPTModel,
    sampler: RequestSampler,
    options: EngineOptions,
    *,
    lockstep: bool,
) -> OverlapScheduler | None:
    """The scheduler that an engine's options ask for.

    Args:
        host: Megatron's engine.
        model: Generates.
        sampler: Of the engine.
        options: Of the engine.
        lockstep: Whether data-parallel ranks share experts, and run each step together.

    Returns:
        None, with the reason logged, if it cannot run.

    Raises:
        ValueError: If it cannot run, but ``decode_loop=True`` asks for it.
    """
    if options.decode_loop is False:
        return None
    why = why_never(host)
    if lockstep and exchange_of(model) is None:
        # Each step then asks all replicas.
        why = why or "data-parallel ranks share experts"
    if why and options.decode_loop:
        raise ValueError(f"decode_loop=True cannot run: {why}")
    if why:
        said = "all steps run by Megatron's scheduler, not by the overlap scheduler"
        log_once(logger, f"{said}: {why}")
        return None
    graphs = model.config.cuda_graph_impl == "local" and options.num_cuda_graphs is not None
    # Ranks that hold one model together run the same steps: they capture and replay together.
    # Context-parallel ones wait for the first of them to sample; stages have no graphs at all.
    one = parallel_state.get_context_parallel_world_size() == 1
    graphs = graphs and one and torch.cuda.is_available()
    return OverlapScheduler(host, model, sampler, graphs=graphs, lockstep=lockstep)
