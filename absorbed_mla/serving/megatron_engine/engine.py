"""What the package does to Megatron's ``DynamicInferenceEngine`` beyond its documented calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.inference_request import DynamicInferenceRequest

from absorbed_mla.serving.megatron_engine.names import STOP_WORDS

# The engine's counters of the prefix cache, and the context's that they are the sums of.
_PREFIX_COUNTERS = {
    "_prefix_cache_hits": "prefix_cache_hits",
    "_prefix_cache_blocks_matched": "prefix_cache_blocks_matched",
    "_prefill_tokens_computed": "prefix_cache_prefill_computed_tokens",
    "_prefill_tokens_skipped": "prefix_cache_prefill_skipped_tokens",
}


def add_request(engine: DynamicInferenceEngine, request: DynamicInferenceRequest) -> None:
    """Add a request to the waiting queue, without the copies of Megatron's ``add_request``."""
    engine._add_request(request)


def can_schedule(engine: DynamicInferenceEngine, request: DynamicInferenceRequest) -> bool:
    """Whether Megatron's scheduler would add a waiting request, or a part of it, to a step now."""
    if engine.enable_chunked_prefill:
        return engine._can_schedule_chunked_prefill(request)
    return engine._can_schedule_non_chunked_prefill(request, record_cg_wait=False)


def admits_by_cuda_graph(engine: DynamicInferenceEngine) -> bool:
    """Whether Megatron's scheduler lets requests wait for a step that has a CUDA graph."""
    return engine._cg_admission_gating_active()


def schedule_waiting_requests(engine: DynamicInferenceEngine) -> None:
    """Let Megatron's scheduler add requests that wait to the next step."""
    engine.schedule_waiting_requests()
    # It has left messages for those who wait for its own steps.
    engine._run_coroutine_sync(asyncio.sleep(0))
    _count_prefix_hits(engine)


def _count_prefix_hits(engine: DynamicInferenceEngine) -> None:
    """Add the context's counters to the engine's, as Megatron does at the end of a step."""
    context = engine.context
    if not context.enable_prefix_caching:
        return
    for ours, theirs in _PREFIX_COUNTERS.items():
        setattr(engine, ours, getattr(engine, ours) + getattr(context, theirs))
        setattr(context, theirs, 0)


def finish_step(engine: DynamicInferenceEngine, step: dict, before: dict) -> dict:
    """Let Megatron give a step's tokens to the requests, and end those that have all of theirs.

    Args:
        engine: Megatron's.
        step: What its controller has made of the step.
        before: What its context was before the step was updated.

    Returns:
        What its ``step_modern`` returns.
    """
    return engine._run_coroutine_sync(engine.async_bookkeep(step, before, 0.0))


def ends_in_stop_word(engine: DynamicInferenceEngine, request: DynamicInferenceRequest) -> bool:
    """Whether the newest tokens of a running request are one of its stop words."""
    found, _ = engine._check_stop_words_for_request_post_append(request)
    return found


def replace_stop_word_check(
    engine: DynamicInferenceEngine,
    check: Callable[[DynamicInferenceRequest], tuple[bool, int]],
) -> None:
    """Have Megatron's steps ask ``check`` whether a request ends.

    Args:
        engine: Megatron's.
        check: Of a request with new tokens: whether it ends, and how many tokens were removed.
    """
    STOP_WORDS.replace(engine, check)


def prefix_blocks_matched(engine: DynamicInferenceEngine) -> int:
    """Blocks that the prefix cache had, since the engine was reset."""
    return engine._prefix_cache_blocks_matched


def tokens_drafted(engine: DynamicInferenceEngine) -> tuple[int, int]:
    """Tokens that MTP layers have proposed since the engine was reset, and those of them accepted.

    It needs an engine with drafts.
    """
    proposed = engine._spec_tokens_proposed_per_pos.sum()
    return int(proposed), int(engine._spec_tokens_accepted_per_pos.sum())
