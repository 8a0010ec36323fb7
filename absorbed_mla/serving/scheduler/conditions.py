"""When the overlap scheduler can run the steps of an engine, and Megatron's runs all of them."""

from __future__ import annotations

import logging

import torch
from megatron.core import parallel_state
from megatron.core.inference.config import AsyncScheduleMode
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer

from absorbed_mla.inference.kv_offload.context import OffloadingContext
from absorbed_mla.log_once import log_once
from absorbed_mla.megatron_names import used_by
from absorbed_mla.serving.data_parallel_attention.model import exchange_of
from absorbed_mla.serving.engine_options import EngineOptions
from absorbed_mla.serving.megatron_engine.names import (
    FULL_CUDA_GRAPHS,
    LAYER,
    OVERLAP_SCHEDULER,
    owners_of,
)
from absorbed_mla.serving.sampling.sampler import RequestSampler
from absorbed_mla.serving.scheduler.overlap_scheduler import OverlapScheduler

logger = logging.getLogger(__name__)


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
    if graphs and (missing := FULL_CUDA_GRAPHS.missing({LAYER: used_by(TransformerLayer)})):
        log_once(logger, "no CUDA graph holds a whole step", missing)
        graphs = False
    return OverlapScheduler(host, model, sampler, graphs=graphs, lockstep=lockstep)
