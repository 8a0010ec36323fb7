"""The best keys of every query in the total order (score, then lower index), by their digits.

A program has one query. It maps scores to integers of the same order and finds the k-th largest in
three passes over them, 11, 11 and 10 bits at a time: each counts how many scores have which digit
among those whose higher digits are the k-th's. A fourth pass writes the keys above it, and of
those equal to it the first ones. So the number of passes is fixed, and the result exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def radix_select(
    scores: Tensor, topk: int, key_start: int, offset: int | None, out: Tensor | None = None
) -> Tensor:
    """The ``topk`` keys of highest score that each query sees; of equal scores the first ones.

    NaN counts as the highest score, equal to infinity; 0 and -0 are equal.

    Args:
        scores: fp32 [B, Q, K], last axis contiguous.
        topk: Keys to choose.
        key_start: Number of the first key.
        offset: Query i sees keys 0 .. i + offset; None for all.
        out: int32 [Q, B, topk], contiguous, for the result; or None.

    Returns:
        int32 [Q, B, topk] on the key axis, ascending, then -1.
    """
    batch, queries, keys = scores.shape
    if out is None:
        out = torch.empty(queries, batch, topk, dtype=torch.int32, device=scores.device)
    if queries * batch:
        _select_kernel[(queries, batch)](
            scores,
            out,
            *scores.stride()[:2],
            keys,
            topk,
            key_start,
            keys if offset is None else offset,
            BLOCK=min(_BLOCK, max(16, triton.next_power_of_2(max(keys, topk)))),
            num_warps=8,
        )
    return out


@triton.jit
def _ordered(row_ptr, key, seen):
    """Scores as int32 of the same order; the least where not seen."""
    score = tl.load(row_ptr + key, mask=seen > key, other=float("-inf"))
    score = tl.where(score != score, float("inf"), score)
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _next_digit(
    row_ptr,
    seen,
    found,
    wanted,
    LOW: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One more digit of the score that is sought.

    Args:
        row_ptr: Scores of the query.
        seen: How many it sees.
        found: The higher digits, shifted to the right by LOW + BITS.
        wanted: Which of the scores with these digits is sought, 1 for the largest.
        LOW: Bits below the digit.
        BITS: Of the digit.
        BLOCK: Scores at a time.

    Returns:
        ``found`` with the digit, and which of the scores with these digits is sought.
    """
    counts = tl.full([1 << BITS], 0, tl.int32)
    place = tl.arange(0, BLOCK)
    for start in range(0, seen, BLOCK):
        value = _ordered(row_ptr, start + place, seen)
        same = start + place < seen
        if LOW + BITS < 32:
            same = same & ((value >> (LOW + BITS)) == found)
            digit = (value >> LOW) & ((1 << BITS) - 1)
        else:
            # The highest digit has the sign.
            digit = (value >> LOW) + (1 << (BITS - 1))
        # What is not counted is counted in the first digit, and taken away again.
        digit = tl.where(same, digit, 0)
        others = BLOCK - tl.reduce(same.to(tl.int32), 0, tl.standard._sum_combine)
        counts += tl.histogram(digit, 1 << BITS)
        counts -= tl.where(tl.arange(0, 1 << BITS) == 0, others, 0)
    total = tl.reduce(counts, 0, tl.standard._sum_combine)
    up_to = tl.associative_scan(counts, 0, tl.standard._sum_combine)
    # Scores of greater digits: as many as all but those up to this one.
    above = total - up_to
    digits = tl.arange(0, 1 << BITS)
    here = (above < wanted) & (above + counts >= wanted)
    digit = tl.reduce(tl.where(here, digits, 0), 0, tl.standard._sum_combine)
    before = tl.reduce(tl.where(here, above, 0), 0, tl.standard._sum_combine)
    if LOW + BITS < 32:
        return (found << BITS) | digit, wanted - before
    return digit - (1 << (BITS - 1)), wanted - before


@triton.jit
def _select_kernel(
    scores_ptr,
    out_ptr,
    stride_b,
    stride_q,
    keys,
    topk,
    key_start,
    offset,
    BLOCK: tl.constexpr,
):
    """The keys of one query."""
    query, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row_ptr = scores_ptr + batch * stride_b + query * stride_q
    result_ptr = out_ptr + (query * tl.num_programs(1) + batch) * topk
    place = tl.arange(0, BLOCK)
    seen = tl.minimum(tl.maximum(tl.program_id(0) + offset + 1, 0), keys)
    count = tl.minimum(seen, topk)
    for start in range(count // BLOCK * BLOCK, topk, BLOCK):
        rest = start + place
        tl.store(
            result_ptr + rest, tl.full([BLOCK], -1, tl.int32), mask=(rest >= count) & (rest < topk)
        )
    if seen <= topk:
        for start in range(0, seen, BLOCK):
            key = start + place
            tl.store(result_ptr + key, key + key_start, mask=key < seen)
    else:
        last, wanted = _next_digit(row_ptr, seen, 0, topk, 21, 11, BLOCK)
        last, wanted = _next_digit(row_ptr, seen, last, wanted, 10, 11, BLOCK)
        last, wanted = _next_digit(row_ptr, seen, last, wanted, 0, 10, BLOCK)
        chosen, ties = 0, 0
        for start in range(0, seen, BLOCK):
            key = start + place
            value = _ordered(row_ptr, key, seen)
            inside = key < seen
            tie = (inside & (value == last)).to(tl.int32)
            tie_number = ties + tl.associative_scan(tie, 0, tl.standard._sum_combine)
            own = inside & ((value > last) | ((value == last) & (tie_number <= wanted)))
            one = own.to(tl.int32)
            number = chosen + tl.associative_scan(one, 0, tl.standard._sum_combine) - one
            tl.store(result_ptr + number, key + key_start, mask=own)
            chosen += tl.reduce(one, 0, tl.standard._sum_combine)
            ties += tl.reduce(tie, 0, tl.standard._sum_combine)
