"""The first pass: sums of weights of every piece, and of those that reach the first edges."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.sampling.argmax import load_peak
from absorbed_mla.kernels.sampling.histogram import count_reaching, publish
from absorbed_mla.kernels.sampling.row_parameters import (
    SAMPLED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    least_share,
    load_number,
)
from absorbed_mla.kernels.sampling.vocabulary_blocks import (
    COLUMNS,
    COUNTING_WARPS,
    HEAD,
    WARPS,
    WAYS,
    Pieces,
)
from absorbed_mla.kernels.sampling.weights import (
    LOWEST,
    is_number,
    keys_of,
    load_piece,
    logit_of,
    ordered,
    total,
    unused_bits,
    weights_of,
)


def launch_weighing(logits: Tensor, numbers: Tensor, pieces: Pieces, *, filters: bool) -> None:
    """Writes the first place of ``counted``; with filters also the peak and the first record."""
    launch(
        _weighing_kernel,
        (pieces.count, pieces.rows),
        logits,
        numbers,
        pieces.peaks,
        pieces.counted,
        pieces.records,
        logits.stride(0),
        *numbers.stride(),
        pieces.vocabulary,
        pieces.records.shape[0] // pieces.rows,
        PIECE=pieces.size,
        PIECES=pieces.width,
        WAYS=WAYS,
        COLUMNS=COLUMNS if filters else 1,
        HEAD=HEAD,
        UNUSED=unused_bits(logits.dtype),
        FILTERS=filters,
        num_warps=COUNTING_WARPS if filters else WARPS,
    )


@triton.jit
def _weighing_kernel(
    logits_ptr,
    numbers_ptr,
    peaks_ptr,
    counted_ptr,
    records_ptr,
    stride_l,
    stride_number,
    stride_row,
    vocabulary,
    record_length,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    WAYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD: tl.constexpr,
    UNUSED: tl.constexpr,
    FILTERS: tl.constexpr,
):
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pieces = tl.num_programs(0)
    peak = load_peak(peaks_ptr, row, pieces, PIECES)
    most = logit_of((peak >> 32).to(tl.int32))
    sampled = load_number(numbers_ptr, row, stride_number, stride_row, SAMPLED) > 0
    record_ptr = records_ptr + row * record_length
    counted_ptr += (row * pieces + piece) * COLUMNS
    # Of NaN and infinity nothing follows.
    if sampled & is_number(most):
        temperature = load_number(numbers_ptr, row, stride_number, stride_row, TEMPERATURE)
        temperature = temperature.to(tl.float32)
        min_p = least_share(numbers_ptr, row, stride_number, stride_row)
        logits, inside = load_piece(logits_ptr + row * stride_l, piece, vocabulary, PIECE)
        weights = weights_of(logits, inside, most, temperature, min_p)
        if not FILTERS:
            tl.store(counted_ptr, total(weights, 0))
        else:
            top_k = load_number(numbers_ptr, row, stride_number, stride_row, TOP_K)
            top_p = load_number(numbers_ptr, row, stride_number, stride_row, TOP_P)
            if piece == 0:
                tl.store(record_ptr, peak)
            if (top_k < vocabulary) | (top_p < 1):
                # All keys reach the first edge and none the last. Between the second one, below
                # which no token has a weight (e**-28 is less than 2**-40), and the largest key they
                # are the closer, the more likely the tokens.
                way = tl.arange(0, WAYS)
                part = (WAYS - 2 - way).to(tl.float32) * (1.0 / (WAYS - 3))
                logit = most - temperature * (28.4 * part * (0.32 + 0.68 * part))
                edges = tl.where(way == 0, LOWEST, ordered(logit)) >> UNUSED
                last = (peak >> 32).to(tl.int32) >> UNUSED
                edges = tl.where(way == WAYS - 1, last + 1, edges)
                counted = count_reaching(keys_of(logits, inside, UNUSED), weights, edges)
                all_tokens = total(tl.where(way == 0, counted, 0), 0)
                tl.store(counted_ptr, all_tokens)
                tl.store(counted_ptr + 1 + way, counted)
                lowest = tl.full([], LOWEST, tl.int32) >> UNUSED
                publish(record_ptr + HEAD, piece, lowest, edges, all_tokens, counted, COLUMNS)
            else:
                tl.store(counted_ptr, total(weights, 0))
