"""Thresholds of top_k and top_p: the last key that they leave of a row, found without a sort.

Tokens are in the order of their keys, the largest first, and of equal ones in that of the
vocabulary. A search wants the largest key that enough tokens reach: ``top_k`` of them, or tokens
whose weights have the sum that ``top_p`` wants. Every pass over the logits knows a range of keys in
which it lies, counts the tokens that reach each of some edges in the range, with their weights, and
so leaves one part of the range to the next pass. Blocks that have no token in it are not read.
The last pass leaves one key, and so many of its tokens as are wanted besides those above it.

This is a radix select with comparisons in place of a histogram: sums of weights in shared memory
would need atomics of 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch
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
    RECORD,
    WAYS,
    VocabularyBlocks,
)
from absorbed_mla.kernels.sampling.weights import (
    is_number,
    keys_of,
    load_block,
    logit_of,
    unused_bits,
    weights_of,
)
from absorbed_mla.kernels.triton.common import sum_of


def launch_thresholds(logits: Tensor, parameters: Tensor, blocks: VocabularyBlocks) -> None:
    """Finds the thresholds of top_k, then those of top_p, from what the first pass has counted."""
    for step in range(2 * blocks.passes):
        begins = step % blocks.passes == 0
        _launch_pass(logits, parameters, blocks, step, begins, step < blocks.passes)


def _launch_pass(
    logits: Tensor,
    parameters: Tensor,
    blocks: VocabularyBlocks,
    step: int,
    begins: bool,
    by_count: bool,
) -> None:
    """One pass, of number ``step`` after the first one, for top_k or for top_p."""
    counted = blocks.counted.view(3, -1)
    launch(
        _threshold_kernel,
        (blocks.count, blocks.rows),
        logits,
        parameters,
        counted[0 if begins else 2 - step % 2],
        counted[1 + step % 2],
        blocks.records,
        logits.stride(0),
        *parameters.stride(),
        blocks.vocabulary,
        blocks.records.shape[0] // blocks.rows,
        HEAD + (0 if begins else step) * RECORD,
        HEAD + (1 + step) * RECORD,
        HEAD + blocks.passes * RECORD,
        BLOCK=blocks.size,
        WAYS=WAYS,
        COLUMNS=COLUMNS,
        HEAD=HEAD,
        UNUSED=unused_bits(logits.dtype),
        BY_COUNT=by_count,
        BEGINS=begins and not by_count,
        num_warps=COUNTING_WARPS,
    )


@triton.jit
def find_part(record_ptr, goal, by_count, COLUMNS: tl.constexpr):
    """The part of a pass's range in which the largest key lies that enough tokens reach.

    Args:
        record_ptr: int64 [3, COLUMNS]: edges, sums, counts.
        goal: A count or a sum.
        by_count: Which of the two; 1 or 0.
        COLUMNS: Number of edges.
    """
    way = tl.arange(0, COLUMNS - 1)
    measured = tl.load(record_ptr + (1 + by_count) * COLUMNS + 1 + way)
    return tl.minimum(sum_of((measured >= goal).to(tl.int32), 0), COLUMNS - 2)


@triton.jit
def settle(record_ptr, goal, by_count, COLUMNS: tl.constexpr):
    """What the last pass has left.

    Returns:
        Its part, the key, the sum of weights above the key, the weight of a token of the key, and
        how many of these are wanted.
    """
    part = find_part(record_ptr, goal, by_count, COLUMNS)
    key = tl.load(record_ptr + part).to(tl.int32)
    sums_ptr, counts_ptr = record_ptr + COLUMNS + part, record_ptr + 2 * COLUMNS + part
    sum_above, count_above = tl.load(sums_ptr + 1), tl.load(counts_ptr + 1)
    # Tokens of one key have one weight.
    ties = tl.maximum(tl.load(counts_ptr) - count_above, 1)
    weight = (tl.load(sums_ptr) - sum_above) // ties
    by_sum = (goal - sum_above + weight - 1) // tl.maximum(weight, 1)
    wanted = tl.where(by_count > 0, goal - count_above, by_sum)
    return part, key, sum_above, weight, wanted


@triton.jit
def _wanted_sum(top_p, all_tokens):
    """The sum of weights with which a token is the last that top_p leaves."""
    limit = top_p * all_tokens.to(tl.float64)
    goal = limit.to(tl.int64)
    goal += (goal.to(tl.float64) < limit).to(tl.int64)
    # The token that crosses the limit is left in, so that there is always one.
    return tl.minimum(tl.maximum(goal, 1), all_tokens)


@triton.jit
def _threshold_kernel(
    logits_ptr,
    parameters_ptr,
    source_ptr,
    target_ptr,
    records_ptr,
    stride_l,
    stride_parameter,
    stride_row,
    vocabulary,
    record_length,
    source_record,
    target_record,
    top_k_record,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD: tl.constexpr,
    UNUSED: tl.constexpr,
    BY_COUNT: tl.constexpr,
    BEGINS: tl.constexpr,
):
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head_ptr = records_ptr + row * record_length
    place = (row * tl.num_programs(0) + block) * COLUMNS
    top_k = load_parameter(parameters_ptr, row, stride_parameter, stride_row, TOP_K)
    top_p = load_parameter(parameters_ptr, row, stride_parameter, stride_row, TOP_P)
    sampled = load_parameter(parameters_ptr, row, stride_parameter, stride_row, SAMPLED) > 0
    most = logit_of((tl.load(head_ptr) >> 32).to(tl.int32))
    searched = top_k < vocabulary if BY_COUNT else top_p < 1
    if searched & sampled & is_number(most):
        if BY_COUNT:
            goal = top_k.to(tl.int64)
        elif BEGINS:
            all_tokens = tl.load(head_ptr + HEAD + COLUMNS)
            if top_k < vocabulary:
                _, _, above, weight, wanted = settle(
                    head_ptr + top_k_record, top_k.to(tl.int64), 1, COLUMNS
                )
                all_tokens = above + wanted * weight
            goal = _wanted_sum(top_p, all_tokens)
            if block == 0:
                tl.store(head_ptr + 1, goal)
        else:
            goal = tl.load(head_ptr + 1)
        record_ptr = head_ptr + source_record
        part = find_part(record_ptr, goal, 1 if BY_COUNT else 0, COLUMNS)
        low, high = tl.load(record_ptr + part), tl.load(record_ptr + part + 1) - 1
        # Below the second edge of the first pass no token has a weight: none of them is drawn.
        high = tl.where((part == 0) & (source_record == HEAD), low, high)
        reached_low = tl.load(source_ptr + place + part)
        reached_none = tl.load(source_ptr + place + part + 1)
        way = tl.arange(0, WAYS)
        step = (high - low + WAYS) // WAYS
        edges = tl.minimum(low + (way + 1) * step, high + 1).to(tl.int32)
        counted = tl.full([WAYS], 0, tl.int64) + reached_none
        if (low < high) & (reached_low != reached_none):
            temperature = load_parameter(
                parameters_ptr, row, stride_parameter, stride_row, TEMPERATURE
            )
            min_p = load_min_p(parameters_ptr, row, stride_parameter, stride_row)
            logits, inside = load_block(logits_ptr + row * stride_l, block, vocabulary, BLOCK)
            weights = weights_of(logits, inside, most, temperature.to(tl.float32), min_p)
            counted = count_reaching(keys_of(logits, inside, UNUSED), weights, edges)
        tl.store(target_ptr + place, reached_low)
        tl.store(target_ptr + place + 1 + way, counted)
        target = head_ptr + target_record
        publish(target, block, low, edges, reached_low, counted, COLUMNS)
