"""When steps can run without Megatron's scheduler, or with nothing of it but its admission."""

from __future__ import annotations

from megatron.core.inference.config import AsyncScheduleMode
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.engines.dynamic_engine import EngineState

from absorbed_mla.inference.kv_offload.context import OffloadingContext
from absorbed_mla.serving.megatron_engine.engine import can_schedule
from absorbed_mla.serving.megatron_engine.names import OVERLAP_SCHEDULER, owners_of


def why_never(host: DynamicInferenceEngine) -> str:
    """Why an engine runs all steps by Megatron's scheduler, or ``""``.

    Drafts, blocks in host memory and Megatron's asynchronous scheduling change more in a step than
    a token; its logs, events and records of routing are written by its own steps.
    """
    if missing := OVERLAP_SCHEDULER.missing(owners_of(host)):
        return missing
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
    return next((reason for reason, holds in conditions.items() if holds), "")


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
    return can_schedule(host, host.get_request(host.waiting_request_ids[0]))
