"""CUDA graphs of the model in steps that read prompts, one for each size.

The host of such a step launches every layer's kernels one by one, and takes longer than the device
where there are few tokens, or the host is slow. Work in a graph may not depend on lengths: whole
prompts attend expanded to the step's own tokens, where a backend can (``full_prefill.py``), and
all else absorbed.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.inference.batch_dimensions_utils import InferenceBatchDimensions
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from absorbed_mla.inference.full_prefill import MOST_PROMPTS
from absorbed_mla.log_once import log_once
from absorbed_mla.serving.data_parallel_attention.model import exchange_of
from absorbed_mla.serving.engine_options import EngineOptions, round_up
from absorbed_mla.serving.megatron_engine.names import PREPARE_STEP, RUN_MODEL
from absorbed_mla.serving.scheduler.block_pool import attentions, indexers
from absorbed_mla.serving.scheduler.full_cuda_graphs import FullCudaGraphs

logger = logging.getLogger(__name__)

# Tokens of the smallest graph, and the least difference between two.
_LEAST_TOKENS, _LEAST_STEP = 64, 32
# Of the largest graph, where nobody says how many. A step of 1,024 tokens takes an H100 2.2 ms per
# layer of DeepSeek-V3's widths, and its host 2.5 or more; a slow one keeps up with 3,072 tokens.
_AUTO_TOKENS = 3072
# Of the largest one that attends absorbed where a step without a graph expands prompts, and of the
# largest one at all where nobody says how many and whole prompts attend absorbed.
_MOST_ABSORBED = 1536
# Pairs of a new token and a key that a graph attends to absorbed in one layer. Each takes
# (2176 - 640) x heads operations more than expanded, as prompts are attended to without a graph:
# about 0.2 ms of an H100 for one prompt of 1,024 tokens, which are half a million pairs. One of
# 1,400 tokens takes the device longer than its host, and a graph would only add to that.
MOST_PAIRS = 1_000_000
# Fewer new tokens after a long context attend absorbed without a graph, too (docs/latent-cache.md).
_EXPANDED_FROM = 171
# Of Megatron's context: sizes that it looks through for one that fits, in any step. Those of decode
# steps do not fit others.
_OFFERED = "cuda_graph_batch_dimensions_list"
_NO_WHOLE_STEPS = "no CUDA graph holds whole decode steps here"


class PrefillGraphs:
    """Takes the place of two functions with which Megatron prepares a step and runs the model.

    Megatron pads a step that reads prompts to one of :func:`prefill_sizes`. Larger steps, those
    that would attend absorbed to more pairs or with more than ``_MOST_ABSORBED`` tokens where
    prompts can be expanded, and those that only decode run as they did before. Ranks that hold one
    model together have equal requests, and decide alike.

    Args:
        host: Megatron's engine, built without graphs of its own for such steps.
        graphs: Of whole steps; holds these, too.
        most_tokens: Of a step with a graph, padding included.
        most_pairs: Of a new token and a key that are attended to in such a step, as
            :func:`pairs_of` counts them, unless whole prompts are expanded.
        expands: Whether whole prompts attend expanded; see ``CachedAttention.expands_in_graphs``.
    """

    def __init__(
        self,
        host: DynamicInferenceEngine,
        graphs: FullCudaGraphs,
        most_tokens: int,
        most_pairs: float = MOST_PAIRS,
        *,
        expands: bool = False,
    ) -> None:
        context, controller = host.context, host.controller
        self._context, self._graphs, self._most_pairs = context, graphs, most_pairs
        self._expands, self._whole_prompts = expands, False
        self._init, self._forward = PREPARE_STEP.of(controller), RUN_MODEL.of(controller)
        tp = parallel_state.get_tensor_model_parallel_world_size()
        most = min(most_tokens, context.max_tokens)
        self._sizes = [
            size for size in prefill_sizes(most, context.max_requests, tp) if self._is_valid(size)
        ]
        most_absorbed = _MOST_ABSORBED if expands else most
        self._absorbed = [size for size in self._sizes if size.token_count <= most_absorbed]
        PREPARE_STEP.replace(controller, self._prepare)
        RUN_MODEL.replace(controller, self._run)

    def _prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Let Megatron prepare a step, and find a size for it here if it reads prompts."""
        context = self._context
        if not context.num_prefill_requests:
            return self._init(*args, **kwargs)
        self._whole_prompts = self._expands and has_whole_prompts(context)
        if not self._whole_prompts and pairs_of(context) > self._most_pairs:
            return self._init(*args, **kwargs)
        sizes = self._sizes if self._whole_prompts else self._absorbed
        with _with(context, _OFFERED, sizes):
            return self._init(*args, **kwargs)

    def capture(self) -> None:
        """Capture the graphs of all sizes, of whole prompts where these attend expanded.

        Traffic would wait for each for a tenth of a second. Those of other rows are captured when a
        step of their size first runs. The context must have no requests; it is reset.
        """
        self._graphs.keep_for(self._context)
        # Smaller ones then take the memory of the largest.
        for size in reversed(self._sizes):
            rows = _with_prompts(size)
            if (size, self._expands) in self._graphs or not self._is_valid(rows):
                continue
            try:
                with _with(self._context, _OFFERED, self._sizes):
                    inputs = self._init(construct_graph_dimensions=rows)
                self._whole_prompts = self._expands
                self._run(*inputs[:2])
            finally:
                self._context.reset()

    def _is_valid(self, size: InferenceBatchDimensions) -> bool:
        """Whether so many requests may run, and their prompts can be as long."""
        context = self._context
        return size.is_valid(context.max_requests, context.max_sequence_length, 0)

    @torch.inference_mode()
    def _run(self, input_ids: Tensor, position_ids: Tensor) -> None:
        """Run the model, by a graph where a step reads prompts and there is one of its size."""
        context, step = self._context, partial(self._forward, input_ids, position_ids)
        size = context.padded_batch_dimensions
        if not context.using_cuda_graph_this_step() or not size.prefill_req_count:
            step()
            return
        self._graphs.keep_for(context)
        key = size, self._whole_prompts
        # It tells the cache which rows a captured step may have.
        with _with(context, "reads_whole_prompts", self._whole_prompts):
            self._graphs.run(key, step, self._sizes[-1].token_count / size.token_count)


def _with_prompts(size: InferenceBatchDimensions) -> InferenceBatchDimensions:
    """Requests that decode before a few prompts, as ``WholePrompts`` has them, in one size."""
    tokens, rows = size.token_count, size.prefill_req_count
    prompts = max(1, min(MOST_PROMPTS, rows, tokens // 2))
    decoding = max(0, min(rows - prompts, tokens - 2 * prompts))
    return InferenceBatchDimensions(tokens, prompts, decoding)


@contextlib.contextmanager
def _with(context: DynamicInferenceContext, name: str, value: object) -> Iterator[None]:
    """An attribute of the context is another one inside of the block."""
    former = getattr(context, name, False)
    setattr(context, name, value)
    try:
        yield
    finally:
        setattr(context, name, former)


def prefill_sizes(
    most_tokens: int, max_requests: int, tp: int = 1
) -> list[InferenceBatchDimensions]:
    """Sizes that steps are padded to, smallest first, with rows for as many requests as may run.

    Numbers of tokens differ by 32 up to 256, and by an eighth of a power of two above. Rows for
    prompts may hold requests that decode, so that the numbers of both are no matter.

    Args:
        most_tokens: Of the largest.
        max_requests: Of any step; a multiple of ``tp``.
        tp: Tensor-parallel size, of which all numbers are multiples: ranks may divide the tokens.
    """
    largest = most_tokens // tp * tp
    tokens = {min(round_up(count, tp), largest) for count in _token_counts(largest)} | {largest}
    return [InferenceBatchDimensions(each, min(max_requests, each), 0) for each in sorted(tokens)]


def _token_counts(most: int) -> Iterator[int]:
    count = _LEAST_TOKENS
    while count < most:
        yield count
        power = 1 << (count.bit_length() - 1)
        count += max(_LEAST_STEP, power // 8)


def pairs_of(context: DynamicInferenceContext) -> float:
    """Pairs of a new token and a key in the next step, in rows that would attend expanded."""
    rows = slice(context.paused_request_count, context.total_request_count)
    new = context.request_query_lengths[rows].numpy().astype(np.int64)
    cached = context.request_kv_length_offsets[rows].numpy()
    expanded = new * (new + cached) > _EXPANDED_FROM * cached
    return float((new * (cached + new / 2))[expanded].sum())


def has_whole_prompts(context: DynamicInferenceContext) -> bool:
    """Whether the next step has rows as ``WholePrompts`` has them."""
    rows = slice(context.paused_request_count, context.total_request_count)
    prompts = context.request_query_lengths[rows].numpy() > 1
    count = int(prompts.sum())
    last = slice(len(prompts) - count, None)
    whole = not context.request_kv_length_offsets[rows].numpy()[prompts].any()
    return 0 < count <= MOST_PROMPTS and whole and bool(prompts[last].all())


def prefill_graphs(
    host: DynamicInferenceEngine, model: GPTModel, graphs: FullCudaGraphs | None, most_tokens: int
) -> PrefillGraphs | None:
    """Graphs of an engine that asks for them; None, with the reason logged, if it can have none.

    Args:
        graphs: Of its decode steps; None: these have none.
        most_tokens: Of a step with a graph; 0: the engine does not ask.
    """
    if not most_tokens:
        return None
    if why := why_none(model) or (_NO_WHOLE_STEPS if graphs is None else ""):
        log_once(logger, "steps that read prompts run without CUDA graphs", why)
        return None
    assert graphs is not None
    # What attends absorbed in any case gains from every graph.
    options = (one.options for one in attentions(model))
    absorbed = all(one.form == "absorbed" or one.batch_invariant for one in options)
    most_pairs = math.inf if absorbed else MOST_PAIRS
    return PrefillGraphs(host, graphs, most_tokens, most_pairs, expands=_expands(model))


def _expands(model: GPTModel) -> bool:
    """Whether whole prompts attend expanded in a graph, in all layers."""
    device, dtype = next(model.parameters()).device, model.config.params_dtype
    layers = (one.cached_attention for one in attentions(model))
    return all(one.expands_in_graphs(device, dtype) for one in layers)


def chosen_tokens(model: GPTModel, options: EngineOptions) -> int:
    """``prefill_graph_tokens`` for options where it is 0; logs why if it stays so."""
    if options.num_cuda_graphs is None:
        return 0
    refused = options.not_with_prefill_graphs()
    why = f"they do not go with {refused}" if refused else why_none(model)
    if why:
        log_once(logger, "steps that read prompts have no CUDA graph of the whole model", why)
        return 0
    most = _AUTO_TOKENS if _expands(model) else _MOST_ABSORBED
    return min(most, options.step_tokens)


def why_none(model: GPTModel) -> str:
    """Why a model's steps that read prompts cannot be in graphs, or ``""``."""
    config = model.config
    one = parallel_state.get_context_parallel_world_size() == 1
    one = one and parallel_state.get_pipeline_model_parallel_world_size() == 1
    whole_steps = config.cuda_graph_impl == "local" and one and torch.cuda.is_available()
    conditions = {
        _NO_WHOLE_STEPS: not whole_steps or config.moe_enable_routing_replay,
        "ranks read prompts of their own": exchange_of(model) is not None,
        # With room for every token in every expert, most of a prefill would be padding.
        "experts run one after the other": config.moe_pad_experts_for_cuda_graph_inference,
        "attention is Megatron's": len(attentions(model)) < len(model.decoder.layers),
        "attention is sparse": bool(indexers(model)),
        # Its memory would be that of all requests with as many tokens as the step.
        "FlashMLA pads every request to the longest": may_take_flash_mla(model),
    }
    return next((reason for reason, holds in conditions.items() if holds), "")


def may_take_flash_mla(model: GPTModel) -> bool:
    """Whether FlashMLA is named, or may be what ``auto`` takes."""
    names = {one.options.paged_attention_backend for one in attentions(model)}
    return "flash_mla" in names or ("auto" in names and find_spec("flash_mla") is not None)
