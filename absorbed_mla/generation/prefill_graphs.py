"""CUDA graphs of the model in steps that read prompts, captured when one of their size first runs.

The host of such a step launches every layer's kernels one by one, and takes longer than the device
where there are few tokens. A graph attends absorbed, since its work may not depend on lengths.
"""

from __future__ import annotations

import logging
from functools import partial
from importlib.util import find_spec

import torch
from megatron.core.inference.batch_dimensions_utils import InferenceBatchDimensions
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from absorbed_mla.generation.blocks import indexers
from absorbed_mla.generation.decode_loop.graphs import StepGraphs
from absorbed_mla.generation.decode_loop.loop import DecodeLoop
from absorbed_mla.log_once import log_once

logger = logging.getLogger(__name__)

# Tokens of the smallest graph; the sizes of others double.
_LEAST_TOKENS = 64
# Requests of a graph for few of them; those of the other one are as many as may run together.
_FEW_REQUESTS = 4


class PrefillGraphs:
    """Takes the place of the function with which Megatron runs the model in a step.

    Megatron pads a step that reads prompts to one of :func:`prefill_sizes`; larger ones, and those
    that only decode, run as they did before.

    Args:
        host: Megatron's engine, built without graphs of its own for such steps.
        graphs: Of whole steps; holds these, too.
        most_tokens: Of a step with a graph, padding included.
    """

    def __init__(self, host: DynamicInferenceEngine, graphs: StepGraphs, most_tokens: int) -> None:
        context, controller = host.context, host.controller
        self._context, self._graphs = context, graphs
        self._forward = controller._dynamic_step_forward_logits
        # Megatron looks here for the size of every step.
        context.cuda_graph_batch_dimensions_list += [
            size
            for size in prefill_sizes(min(most_tokens, context.max_tokens), context.max_requests)
            if size.is_valid(context.max_requests, context.max_sequence_length, 0)
        ]
        controller._dynamic_step_forward_logits = self._run

    @torch.inference_mode()
    def _run(self, input_ids: Tensor, position_ids: Tensor) -> None:
        """Run the model, by a graph where a step reads prompts and there is one of its size."""
        context, step = self._context, partial(self._forward, input_ids, position_ids)
        size = context.padded_batch_dimensions
        if not context.using_cuda_graph_this_step() or not size.prefill_req_count:
            step()
            return
        self._graphs.keep_for(context)
        self._graphs.run(size, step)


def prefill_sizes(most_tokens: int, max_requests: int) -> list[InferenceBatchDimensions]:
    """Sizes that steps are padded to: two for every number of tokens.

    Rows for prompts may hold requests that decode, so that the numbers of both are no matter.

    Args:
        most_tokens: Of the largest.
        max_requests: Of any step.
    """
    tokens = [most_tokens]
    while tokens[-1] > _LEAST_TOKENS:
        tokens.append(max(_LEAST_TOKENS, -(-tokens[-1] // 2)))
    requests = {min(_FEW_REQUESTS, max_requests), max_requests}
    pairs = {(count, min(rows, count)) for count in tokens for rows in requests}
    return [InferenceBatchDimensions(count, rows, 0) for count, rows in sorted(pairs, reverse=True)]


def prefill_graphs(
    host: DynamicInferenceEngine, model: GPTModel, loop: DecodeLoop | None, most_tokens: int
) -> PrefillGraphs | None:
    """Graphs of an engine that asks for them; None, with the reason logged, if it can have none.

    Args:
        host: Megatron's engine.
        model: Generates.
        loop: Of its decode steps.
        most_tokens: Of a step with a graph; 0: the engine does not ask.
    """
    if not most_tokens:
        return None
    if why := why_none(model, loop):
        log_once(logger, "steps that read prompts run without CUDA graphs", why)
        return None
    assert loop is not None and loop.graphs is not None
    return PrefillGraphs(host, loop.graphs, most_tokens)


def why_none(model: GPTModel, loop: DecodeLoop | None) -> str:
    """Why a model's steps that read prompts cannot be in graphs, or ``""``."""
    conditions = {
        "no CUDA graph holds whole decode steps here": loop is None or loop.graphs is None,
        "ranks read prompts of their own": loop is not None and loop.together,
        # With room for every token in every expert, most of a prefill would be padding.
        "experts run one after the other": model.config.moe_pad_experts_for_cuda_graph_inference,
        "attention is sparse": bool(indexers(model)),
        # Its memory would be that of all requests with as many tokens as the step.
        "FlashMLA pads every request to the longest": _may_take_flash_mla(model),
    }
    return next((reason for reason, holds in conditions.items() if holds), "")


def _may_take_flash_mla(model: GPTModel) -> bool:
    attentions = (layer.self_attention for layer in model.decoder.layers)
    names = {attention.options.paged_attention_backend for attention in attentions}
    return "flash_mla" in names or ("auto" in names and find_spec("flash_mla") is not None)
