"""Megatron's engine around a model, with its cache; inference mode of model and process."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping, Sequence

from megatron.core import parallel_state
from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import MLATransformerConfig

from absorbed_mla.fp8 import without_fp8
from absorbed_mla.inference.decode_context_parallel.context import decode_context_parallel_context
from absorbed_mla.inference.index_keys import allocate_index_keys
from absorbed_mla.inference.kv_offload.context import OffloadingContext
from absorbed_mla.inference.megatron_buffers import drop_inference_buffers
from absorbed_mla.inference.prefill_context_parallel import dividing_prefill
from absorbed_mla.log_once import log_once
from absorbed_mla.megatron_names import ALLOCATOR, CONTEXT, Need
from absorbed_mla.serving.data_parallel_attention.mlp import with_groups
from absorbed_mla.serving.data_parallel_attention.model import exchange_of
from absorbed_mla.serving.engine_options import EngineOptions
from absorbed_mla.serving.megatron_engine.attributes import make_no_texts
from absorbed_mla.serving.megatron_engine.names import (
    ANY_ENGINE,
    CONTROLLER,
    DRAFTS,
    ENGINE,
    PREFIX_CACHE_DIR,
    PREFIX_CACHING,
    RESUMING,
    SAMPLER,
    TOKEN_RECORDS,
    VIEW,
)
from absorbed_mla.serving.model_ranks import require_divided
from absorbed_mla.serving.returned_choices import ReturnedChoices, asked_choices
from absorbed_mla.serving.sampling.stop_tokens import end_at_first_stop_token
from absorbed_mla.serving.scheduler.block_pool import (
    cache_config,
    indexers,
    place_drafts,
)
from absorbed_mla.serving.scheduler.cached_blocks import correct_prefix_cache
from absorbed_mla.serving.scheduler.free_blocks import (
    evict_blocks_together,
    resume_with_cached_blocks,
)
from absorbed_mla.serving.tokenizers.token_ids import IntegerTokenizer

logger = logging.getLogger(__name__)


def host_engine(
    model: GPTModel, options: EngineOptions, sampler: Sampling
) -> DynamicInferenceEngine:
    """Build Megatron's engine with its cache, and capture CUDA graphs if options ask for them.

    Args:
        sampler: Draws the tokens, instead of Megatron's own.

    Raises:
        ValueError: If the options do not fit the model, each other, or this version of Megatron.
    """
    require_divided(model, options)
    needs = _needs(options)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    cp = parallel_state.get_context_parallel_world_size()
    of_cache = cache_config(model)
    config = options.to_host(of_cache, len(model.decoder.layers), tp, cp)
    config.pg_collection = _groups_of_steps(model, options)
    context = _context(model, options, _with_training_dispatcher(of_cache), config)
    _require(needs, {CONTEXT: context})
    allocator = context.kv_block_allocator
    _require(needs, {ALLOCATOR: allocator, VIEW: context.gpu_view})
    _correct(context, options)
    if with_keys := indexers(model):
        width, buffer = with_keys[0].dsa.head_dim, context.memory_buffer
        allocate_index_keys(context, len(with_keys), width, buffer.dtype, buffer.device)
    wrapper = GPTInferenceWrapper(model, context)
    controller = TextGenerationController(wrapper, IntegerTokenizer(model.vocab_size))
    _require(needs, {CONTROLLER: controller})
    # It chooses one of its own by name, and has no argument for another.
    SAMPLER.replace(controller, sampler)
    make_no_texts(controller)
    choices = context.returned_choices = ReturnedChoices.of(model, context, options)
    with contextlib.nullcontext() if choices is None else choices.recording():
        # Graphs of layers are captured here.
        host = DynamicInferenceEngine(controller, context)
    _require(needs, {ENGINE: host})
    if options.num_speculative_tokens:
        end_at_first_stop_token(host)
    return host


def _needs(options: EngineOptions) -> list[Need]:
    """What the options ask for that cannot run without names of Megatron's."""
    asked = {
        ANY_ENGINE: True,
        PREFIX_CACHING: options.prefix_caching,
        PREFIX_CACHE_DIR: options.prefix_cache_dir is not None,
        DRAFTS: options.num_speculative_tokens > 0,
        TOKEN_RECORDS: bool(asked_choices(options)),
    }
    return [need for need, wanted in asked.items() if wanted]


def _require(needs: Sequence[Need], owners: Mapping[str, object]) -> None:
    for need in needs:
        need.require(owners)


def _correct(context: DynamicInferenceContext, options: EngineOptions) -> None:
    """Replace what Megatron's context and allocator do wrong, or slowly."""
    allocator = context.kv_block_allocator
    correct_prefix_cache(context)
    if options.prefix_caching:
        evict_blocks_together(allocator)
    if missing := RESUMING.missing({ALLOCATOR: allocator}):
        log_once(logger, "Megatron resumes paused requests by its own rule", missing)
    else:
        resume_with_cached_blocks(context)
    place_drafts(context)


def _groups_of_steps(model: GPTModel, options: EngineOptions) -> ProcessGroupCollection | None:
    """Process groups whose ranks agree on the size of a step with CUDA graphs; None: Megatron's.

    Megatron's ranks of experts do: if none of them has a prompt to read, all take the graph for the
    largest number of tokens. With data-parallel attention it is all that divide weights.
    """
    exchange = exchange_of(model)
    if exchange is None or options.num_cuda_graphs is None:
        return None
    return with_groups(ProcessGroupCollection.use_mpu_process_groups(), ep=exchange.group)


def _context(
    model: GPTModel,
    options: EngineOptions,
    of_cache: MLATransformerConfig,
    config: InferenceConfig,
) -> DynamicInferenceContext:
    """Megatron's context, one that ranks share, or one that has blocks in host memory besides.

    Raises:
        ValueError: If it is to have them and the model cannot attend to a part of its keys.
    """
    if options.decode_context_parallel:
        return decode_context_parallel_context(of_cache, config)
    if not options.host_blocks:
        return DynamicInferenceContext(of_cache, config)
    got = f"got {options.host_cache_tokens}"
    if indexers(model):
        raise ValueError(
            "host_cache_tokens must be 0 for experimental_attention_variant='dsa', "
            f"{got}: any token may be chosen, and is read on the device"
        )
    if any(getattr(getattr(m, "options", None), "batch_invariant", False) for m in model.modules()):
        raise ValueError(
            "host_cache_tokens must be 0 with batch_invariant (parity=True), "
            f"{got}: parts of a cache would be summed up one by one"
        )
    return OffloadingContext(of_cache, config, options.host_blocks)


def _with_training_dispatcher(config: MLATransformerConfig) -> MLATransformerConfig:
    """The config, without the experts' dispatcher that needs symmetric memory of NVLink.

    Only Megatron's inference-optimized layers use it, but the context allocates its buffers for any
    model whose ranks share experts.
    """
    if config.transformer_impl == "inference_optimized":
        return config
    config = copy.copy(config)
    config.inference_moe_token_dispatcher_type = "nccl"
    return config


def _dividing_prompts(model: GPTModel) -> contextlib.AbstractContextManager:
    """Have context-parallel ranks divide the prompts that they read.

    Not over pipeline stages, which hand each other all tokens.
    """
    group = parallel_state.get_context_parallel_group()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if group.size() == 1 or stages > 1:
        return contextlib.nullcontext()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    return dividing_prefill(model.decoder, group, tp if model.config.sequence_parallel else 1)


@contextlib.contextmanager
def inference_mode(model: GPTModel) -> Iterator[None]:
    """Put the model into evaluation mode and Megatron into inference mode; both return at the end.

    FP8 is off in between (:func:`without_fp8`), and context-parallel ranks divide prompts. At the
    end the buffers are dropped that inference leaves unusable for training.
    """
    was_training, was_active = model.training, InferenceMode.is_active()
    model.eval()
    InferenceMode.set_active()
    try:
        with without_fp8(model.config), _dividing_prompts(model):
            yield
    finally:
        model.train(was_training)
        if not was_active:
            InferenceMode.unset_active()
        drop_inference_buffers()
