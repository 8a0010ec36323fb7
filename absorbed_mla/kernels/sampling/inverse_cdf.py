"""Inverse-CDF search: the first token with which the sum of weights exceeds a random part of all.

The sum runs in the order of the vocabulary over the tokens that the row's filters leave.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.sampling.argmax import load_argmax, most_likely
from absorbed_mla.kernels.sampling.row_parameters import (
    RANDOM,
    SAMPLED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    load_min_p,
    load_parameter,
)
from absorbed_mla.kernels.sampling.thresholds import settle
from absorbed_mla.kernels.sampling.vocabulary_blocks import (
    COLUMNS,
    HEAD,
    RECORD,
    WARPS,
    VocabularyBlocks,
)
from absorbed_mla.kernels.sampling.weights import (
    NOTHING,
    count_in,
    cumsum,
    is_number,
    keys_of,
    load_block,
    logit_of,
    sum_in,
    unused_bits,
    weights_of,
)
from absorbed_mla.kernels.triton.common import sum_of


def launch_inverse_cdf(
    logits: Tensor, parameters: Tensor, blocks: VocabularyBlocks, tokens: Tensor, *, filters: bool
) -> None:
    """Writes ``tokens``, int64 [rows]; of rows that are not sampled the most likely one.

    -1 for a row whose largest logit is NaN or infinite.
    """
    counted = blocks.counted.view(3 if filters else 1, -1)
    launch(
        _inverse_cdf_kernel,
        (blocks.rows,),
        logits,
        parameters,
        blocks.maxima,
        counted[0],
        counted[-1],
        blocks.records,
        tokens,
        logits.stride(0),
        *parameters.stride(),
        blocks.vocabulary,
        blocks.count,
        blocks.records.shape[0] // blocks.rows,
        HEAD + blocks.passes * RECORD,
        HEAD + 2 * blocks.passes * RECORD,
        BLOCK=blocks.size,
        BLOCKS=blocks.width,
        COLUMNS=COLUMNS if filters else 1,
        UNUSED=unused_bits(logits.dtype),
        FILTERS=filters,
        num_warps=WARPS,
    )


@triton.jit
def _inverse_cdf_kernel(
    logits_ptr,
    parameters_ptr,
    maxima_ptr,
    first_ptr,
    last_ptr,
    records_ptr,
    tokens_ptr,
    stride_l,
    stride_parameter,
    stride_row,
    vocabulary,
    blocks,
    record_length,
    top_k_record,
    top_p_record,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNUSED: tl.constexpr,
    FILTERS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    maximum = load_argmax(maxima_ptr, row, blocks, BLOCKS)
    most = logit_of((maximum >> 32).to(tl.int32))
    token = most_likely(maximum)
    sampled = load_parameter(parameters_ptr, row, stride_parameter, stride_row, SAMPLED) > 0
    if sampled & is_number(most):
        block = tl.arange(0, BLOCKS)
        there = block < blocks
        place = (row * blocks + block) * COLUMNS
        sums = sum_in(tl.load(first_ptr + place, mask=there, other=0))
        # All tokens are above this key, which so has none that might be left.
        threshold = tl.full([], NOTHING, tl.int32)
        wanted = tl.full([], 0, tl.int64)
        ties = tl.full([BLOCKS], 0, tl.int64)
        if FILTERS:
            top_k = load_parameter(parameters_ptr, row, stride_parameter, stride_row, TOP_K)
            top_p = load_parameter(parameters_ptr, row, stride_parameter, stride_row, TOP_P)
            if (top_k < vocabulary) | (top_p < 1):
                # What top_p leaves, top_k would leave, too.
                by_count = (top_p >= 1).to(tl.int32)
                head_ptr = records_ptr + row * record_length
                goal = tl.where(by_count > 0, top_k.to(tl.int64), tl.load(head_ptr + 1))
                record_ptr = head_ptr + tl.where(by_count > 0, top_k_record, top_p_record)
                part, threshold, _, weight, wanted = settle(record_ptr, goal, by_count, COLUMNS)
                at = tl.load(last_ptr + place + part, mask=there, other=0)
                above = tl.load(last_ptr + place + part + 1, mask=there, other=0)
                ties = count_in(at) - count_in(above)
                left = wanted - (cumsum(ties) - ties)
                left = tl.minimum(tl.maximum(left, 0), ties)
                sums = sum_in(above) + left * weight
        up_to = cumsum(sums)
        whole = sum_of(sums, 0)
        random = load_parameter(parameters_ptr, row, stride_parameter, stride_row, RANDOM)
        target = (random * whole.to(tl.float64)).to(tl.int64)
        target = tl.minimum(target, whole - 1)
        # Logits of padding may be anything: the token stays in the vocabulary.
        own = sum_of(((up_to <= target) & there).to(tl.int32), 0)
        own = tl.minimum(own, blocks - 1)
        target -= sum_of(tl.where(block < own, sums, 0), 0)
        wanted -= sum_of(tl.where(block < own, ties, 0), 0)
        temperature = load_parameter(parameters_ptr, row, stride_parameter, stride_row, TEMPERATURE)
        min_p = load_min_p(parameters_ptr, row, stride_parameter, stride_row)
        logits, inside = load_block(logits_ptr + row * stride_l, own, vocabulary, BLOCK)
        weights = weights_of(logits, inside, most, temperature.to(tl.float32), min_p)
        if FILTERS:
            keys = keys_of(logits, inside, UNUSED)
            tie = (keys == threshold).to(tl.int32)
            is_left = (keys > threshold) | ((tie > 0) & (cumsum(tie) <= wanted))
            weights = tl.where(is_left, weights, 0)
        before = sum_of((cumsum(weights) <= target).to(tl.int32), 0)
        token = tl.minimum(own * BLOCK + before, vocabulary - 1).to(tl.int64)
    tl.store(tokens_ptr + row, token)
