"""Engine options derived from the model: KV-cache tokens, ranks sharing them, CUDA graphs."""

from __future__ import annotations

import dataclasses
import logging

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from absorbed_mla.log_once import log_once
from absorbed_mla.serving.data_parallel_attention.model import exchange_of
from absorbed_mla.serving.engine_options import EngineOptions
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.model_ranks import cache_shares, require_shared_cache
from absorbed_mla.serving.option_schema import excluding
from absorbed_mla.serving.returned_choices import bytes_per_token
from absorbed_mla.serving.scheduler.block_pool import BLOCK_SIZE, all_block_bytes
from absorbed_mla.serving.scheduler.prefill_graphs import chosen_tokens

logger = logging.getLogger(__name__)


def engine_options(
    model: GPTModel, options: LLMOptions, max_model_len: int, vocab_size: int | None
) -> EngineOptions:
    """Options of the engine of a model; collective over its ranks.

    Args:
        model: On its device.
        options: Of the caller.
        max_model_len: Of the model.
        vocab_size: Token ids that may be generated; None: all rows of the embedding.

    Raises:
        ValueError: If options and model do not fit each other, or no cache fits.
    """
    options = _with_sharing_chosen(model, options, max_model_len)
    fitting = _fitting_tokens(model, options)
    sizes = options.engine_options(max_model_len, vocab_size, fitting)
    if options.prefill_graph_tokens is None:
        # Before the engine captures other graphs for the same steps.
        sizes = dataclasses.replace(sizes, prefill_graph_tokens=chosen_tokens(model, sizes))
    return sizes


def _with_sharing_chosen(model: GPTModel, options: LLMOptions, max_model_len: int) -> LLMOptions:
    """The options with ``decode_context_parallel`` True or False.

    A step over a shared cache has two exchanges per layer more and is slower for equally many
    requests; but where not all of ``max_num_seqs`` fit, as many times the requests as there are
    ranks run together, which gains more (docs/parallel-serving.md).
    """
    if options.decode_context_parallel != "auto":
        return options
    why = _why_not_shared(model, options, max_model_len)
    log_once(
        logger,
        f"decode_context_parallel='auto' runs as {not why}",
        why or "max_num_seqs requests of max_model_len tokens do not fit on each rank",
    )
    return dataclasses.replace(options, decode_context_parallel=not why)


def _why_not_shared(model: GPTModel, options: LLMOptions, max_model_len: int) -> str:
    """Why every rank keeps all latents, or ``""``."""
    if exchange_of(model) is not None:
        return "each rank has requests of its own"
    for name in excluding(options, "decode_context_parallel", True):
        return f"{name} needs all latents on each rank"
    try:
        require_shared_cache(model, options.num_speculative_tokens)
    except ValueError as error:
        return str(error)
    if parallel_state.get_context_parallel_world_size() > 1:
        # Nothing else generates under context parallelism.
        return ""
    room = _fitting_tokens(model, dataclasses.replace(options, decode_context_parallel=False))
    if room is None:
        return "no memory of a GPU says how many tokens fit, or cache_tokens does"
    if room >= options.useful_tokens(options.max_model_len or max_model_len):
        return "max_num_seqs requests of max_model_len tokens fit on each rank"
    return ""


def _fitting_tokens(model: GPTModel, options: LLMOptions) -> int | None:
    """Tokens whose latents and index keys fit beside the model on every rank.

    Args:
        model: On its device.
        options: Say what share of the memory to use.

    Returns:
        None on a CPU, and where ``cache_tokens`` is given.

    Raises:
        ValueError: If not one block fits.
    """
    device = next(model.parameters()).device
    if device.type != "cuda" or options.cache_tokens is not None:
        return None
    utilization = options.gpu_memory_utilization
    free, total = torch.cuda.mem_get_info(device)
    choices = bytes_per_token(model, options)
    # Those of a step are in a tensor of their own.
    room = free - (1 - utilization) * total - options.step_tokens * choices
    shares = cache_shares() if options.decode_context_parallel else 1
    block = all_block_bytes(model)
    # Every rank has those of all tokens.
    block += shares * BLOCK_SIZE * choices
    tokens = int(room * shares // block) * BLOCK_SIZE
    least = torch.tensor(tokens, device=device)
    exchange = exchange_of(model)
    groups = [
        parallel_state.get_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        *([] if exchange is None else [exchange.group]),
    ]
    for group in groups:
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    if least < BLOCK_SIZE:
        raise ValueError(
            f"gpu_memory_utilization {utilization} leaves no memory for a cache: of "
            f"{total / 2**30:.0f} GiB, {free / 2**30:.1f} are free beside the model"
        )
    return int(least)
