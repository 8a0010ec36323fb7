"""Sums of softmax weights of a vocabulary block, in all and above the first top-k/p edges."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.sampling.argmax import load_argmax
from absorbed_mla.kernels.sampling.histogram import count_reaching, publish
from absorbed_mla.kernels.sampling.row_parameters import (
    SAMPLED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    load_min_p,
    load_parameter,
)
from absorbed_mla.kernels.sampling.vocabulary_blocks import (
    COLUMNS,
    COUNTING_WARPS,
    HEAD,
    WARPS,
    WAYS,
    VocabularyBlocks,
)
from absorbed_mla.kernels.sampling.weights import (
    LOWEST,
    is_number,
    keys_of,
    load_block,
    logit_of,
    ordered,
    unused_bits,
    weights_of,
)
from absorbed_mla.kernels.triton.common import sum_of


def launch_softmax_weights(
    logits: Tensor, parameters: Tensor, blocks: VocabularyBlocks, *, filters: bool
) -> None:
    """Writes the blocks' sums to ``counted``, with filters the maximum and edges to ``records``."""
    launch(
        _softmax_weights_kernel,
        (blocks.count, blocks.rows),
        logits,
        parameters,
        blocks.maxima,
        blocks.counted,
        blocks.records,
        logits.stride(0),
        *parameters.stride(),
        blocks.vocabulary,
        blocks.records.shape[0] // blocks.rows,
        BLOCK=blocks.size,
        BLOCKS=blocks.width,
        WAYS=WAYS,
        COLUMNS=COLUMNS if filters else 1,
        HEAD=HEAD,
        UNUSED=unused_bits(logits.dtype),
        FILTERS=filters,
        num_warps=COUNTING_WARPS if filters else WARPS,
    )


@triton.jit
def _softmax_weights_kernel(
    logits_ptr,
    parameters_ptr,
    maxima_ptr,
    counted_ptr,
    records_ptr,
    stride_l,
    stride_parameter,
    stride_row,
    vocabulary,
    record_length,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    WAYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD: tl.constexpr,
    UNUSED: tl.constexpr,
    FILTERS: tl.constexpr,
):
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0)
    maximum = load_argmax(maxima_ptr, row, blocks, BLOCKS)
    most = logit_of((maximum >> 32).to(tl.int32))
    sampled = load_parameter(parameters_ptr, row, stride_parameter, stride_row, SAMPLED) > 0
    record_ptr = records_ptr + row * record_length
    counted_ptr += (row * blocks + block) * COLUMNS
    # Of NaN and infinity nothing follows.
    if sampled & is_number(most):
        temperature = load_parameter(parameters_ptr, row, stride_parameter, stride_row, TEMPERATURE)
        temperature = temperature.to(tl.float32)
        min_p = load_min_p(parameters_ptr, row, stride_parameter, stride_row)
        logits, inside = load_block(logits_ptr + row * stride_l, block, vocabulary, BLOCK)
        weights = weights_of(logits, inside, most, temperature, min_p)
        if not FILTERS:
            tl.store(counted_ptr, sum_of(weights, 0))
        else:
            top_k = load_parameter(parameters_ptr, row, stride_parameter, stride_row, TOP_K)
            top_p = load_parameter(parameters_ptr, row, stride_parameter, stride_row, TOP_P)
            if block == 0:
                tl.store(record_ptr, maximum)
            if (top_k < vocabulary) | (top_p < 1):
                # All keys reach the first edge and none the last. Between the second one, below
                # which no token has a weight (e**-28 is less than 2**-40), and the largest key they
                # are the closer, the more likely the tokens.
                way = tl.arange(0, WAYS)
                part = (WAYS - 2 - way).to(tl.float32) * (1.0 / (WAYS - 3))
                logit = most - temperature * (28.4 * part * (0.32 + 0.68 * part))
                edges = tl.where(way == 0, LOWEST, ordered(logit)) >> UNUSED
                last = (maximum >> 32).to(tl.int32) >> UNUSED
                edges = tl.where(way == WAYS - 1, last + 1, edges)
                counted = count_reaching(keys_of(logits, inside, UNUSED), weights, edges)
                all_tokens = sum_of(tl.where(way == 0, counted, 0), 0)
                tl.store(counted_ptr, all_tokens)
                tl.store(counted_ptr + 1 + way, counted)
                lowest = tl.full([], LOWEST, tl.int32) >> UNUSED
                publish(record_ptr + HEAD, block, lowest, edges, all_tokens, counted, COLUMNS)
            else:
                tl.store(counted_ptr, sum_of(weights, 0))
