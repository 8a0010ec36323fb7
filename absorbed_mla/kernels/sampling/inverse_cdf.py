"""The token at a row's random number: the first with which a sum of weights exceeds a part of all.

The sum runs in the order of the vocabulary over the tokens that the row's filters leave.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.sampling.argmax import load_peak, most_likely
from absorbed_mla.kernels.sampling.row_parameters import (
    RANDOM,
    SAMPLED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    least_share,
    load_number,
)
from absorbed_mla.kernels.sampling.thresholds import settle
from absorbed_mla.kernels.sampling.vocabulary_blocks import COLUMNS, HEAD, RECORD, WARPS, Pieces
from absorbed_mla.kernels.sampling.weights import (
    NOTHING,
    count_in,
    is_number,
    keys_of,
    load_piece,
    logit_of,
    running,
    sum_in,
    total,
    unused_bits,
    weights_of,
)


def launch_place(
    logits: Tensor, numbers: Tensor, pieces: Pieces, tokens: Tensor, *, filters: bool
) -> None:
    """Writes ``tokens``, int64 [rows]; of rows that are not sampled the most likely one.

    -1 for a row whose largest logit is NaN or infinite.
    """
    counted = pieces.counted.view(3 if filters else 1, -1)
    launch(
        _place_kernel,
        (pieces.rows,),
        logits,
        numbers,
        pieces.peaks,
        counted[0],
        counted[-1],
        pieces.records,
        tokens,
        logits.stride(0),
        *numbers.stride(),
        pieces.vocabulary,
        pieces.count,
        pieces.records.shape[0] // pieces.rows,
        HEAD + pieces.passes * RECORD,
        HEAD + 2 * pieces.passes * RECORD,
        PIECE=pieces.size,
        PIECES=pieces.width,
        COLUMNS=COLUMNS if filters else 1,
        UNUSED=unused_bits(logits.dtype),
        FILTERS=filters,
        num_warps=WARPS,
    )


@triton.jit
def _place_kernel(
    logits_ptr,
    numbers_ptr,
    peaks_ptr,
    first_ptr,
    last_ptr,
    records_ptr,
    tokens_ptr,
    stride_l,
    stride_number,
    stride_row,
    vocabulary,
    pieces,
    record_length,
    top_k_record,
    top_p_record,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNUSED: tl.constexpr,
    FILTERS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    peak = load_peak(peaks_ptr, row, pieces, PIECES)
    most = logit_of((peak >> 32).to(tl.int32))
    token = most_likely(peak)
    sampled = load_number(numbers_ptr, row, stride_number, stride_row, SAMPLED) > 0
    if sampled & is_number(most):
        piece = tl.arange(0, PIECES)
        there = piece < pieces
        place = (row * pieces + piece) * COLUMNS
        sums = sum_in(tl.load(first_ptr + place, mask=there, other=0))
        # All tokens are above this key, which so has none that might be left.
        threshold = tl.full([], NOTHING, tl.int32)
        wanted = tl.full([], 0, tl.int64)
        ties = tl.full([PIECES], 0, tl.int64)
        if FILTERS:
            top_k = load_number(numbers_ptr, row, stride_number, stride_row, TOP_K)
            top_p = load_number(numbers_ptr, row, stride_number, stride_row, TOP_P)
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
                left = wanted - (running(ties) - ties)
                left = tl.minimum(tl.maximum(left, 0), ties)
                sums = sum_in(above) + left * weight
        up_to = running(sums)
        whole = total(sums, 0)
        random = load_number(numbers_ptr, row, stride_number, stride_row, RANDOM)
        target = (random * whole.to(tl.float64)).to(tl.int64)
        target = tl.minimum(target, whole - 1)
        # Logits of padding may be anything: the token stays in the vocabulary.
        own = total(((up_to <= target) & there).to(tl.int32), 0)
        own = tl.minimum(own, pieces - 1)
        target -= total(tl.where(piece < own, sums, 0), 0)
        wanted -= total(tl.where(piece < own, ties, 0), 0)
        temperature = load_number(numbers_ptr, row, stride_number, stride_row, TEMPERATURE)
        min_p = least_share(numbers_ptr, row, stride_number, stride_row)
        logits, inside = load_piece(logits_ptr + row * stride_l, own, vocabulary, PIECE)
        weights = weights_of(logits, inside, most, temperature.to(tl.float32), min_p)
        if FILTERS:
            keys = keys_of(logits, inside, UNUSED)
            tie = (keys == threshold).to(tl.int32)
            is_left = (keys > threshold) | ((tie > 0) & (running(tie) <= wanted))
            weights = tl.where(is_left, weights, 0)
        before = total((running(weights) <= target).to(tl.int32), 0)
        token = tl.minimum(own * PIECE + before, vocabulary - 1).to(tl.int64)
    tl.store(tokens_ptr + row, token)
