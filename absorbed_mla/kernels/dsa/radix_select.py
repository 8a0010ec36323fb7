"""The best keys of every query in the total order (score, then lower index), by their bits.

A program has a segment of the scores of one query. It keeps them in registers, as integers of the
same order, and finds the k-th largest bit by bit: how many are not below the bits found so far with
the next one set? Then it writes the keys above the k-th, and of those equal to it the first ones.
A query with more keys than a segment has takes several rounds: the best keys of its segments, in
their order, are what the next round chooses among, so that the result is as exact.

Counting by bits was taken over a histogram of digits, which Triton computes with votes of the warp:
for 2048 bins more than a hundred instructions for every score, here at most 64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Scores of a program, at most: 32 in the registers of each of 512 threads; of 1024, they spill.
_SEGMENT = 16384
_SCORES_PER_WARP, _WARPS = 1024, (4, 16)
# Keys that are written at a time.
_CHUNK = 4096


def most_keys() -> int:
    """The largest ``topk``: a round must leave half of the keys at most."""
    return _SEGMENT // 2


def radix_select(
    scores: Tensor,
    topk: int,
    key_start: int,
    offset: int | None,
    out: Tensor | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """The ``topk`` keys of highest score that each query sees; of equal scores the first ones.

    NaN counts as the highest score, equal to infinity; 0 and -0 are equal. Scores of a query that
    sees no more than ``topk`` keys are not read.

    Args:
        scores: fp32 [B, Q, K], last axis contiguous.
        topk: Keys to choose.
        key_start: Number of the first key.
        offset: Query i sees keys 0 .. i + offset; None for all.
        out: int32 [Q, B, topk], contiguous, for the result; or None.
        seen: int32 [Q], contiguous: how many keys each query sees, instead of ``offset``.

    Returns:
        int32 [Q, B, topk] on the key axis, ascending, then -1.

    Raises:
        ValueError: If ``topk`` is more than half of a segment.
    """
    batch, queries, keys = scores.shape
    if topk > most_keys():
        raise ValueError(f"topk must be at most {most_keys()}, got {topk}")
    if out is None:
        out = torch.empty(queries, batch, topk, dtype=torch.int32, device=scores.device)
    if not queries * batch:
        return out
    offset = keys if offset is None else offset
    source, length = None, keys
    while True:
        block = min(_SEGMENT, max(16, triton.next_power_of_2(max(length, 1))))
        segments = max(triton.cdiv(length, block), 1)
        last = segments == 1
        target = out if last else out.new_empty(queries, batch, segments, topk)
        _select_kernel[(queries, batch, segments)](
            scores,
            scores if source is None else source,
            scores if seen is None else seen,
            target,
            *scores.stride()[:2],
            keys,
            length,
            topk,
            key_start if last else 0,
            offset,
            BLOCK=block,
            CHUNK=min(_CHUNK, block),
            FIRST=source is None,
            COUNTED=seen is not None,
            num_warps=min(max(block // _SCORES_PER_WARP, _WARPS[0]), _WARPS[1]),
        )
        if last:
            return out
        source, length = target, segments * topk


@triton.jit
def _keys(source_ptr, place, length, seen, FIRST: tl.constexpr):
    """Keys at places of the round's input, and which of them there are."""
    if FIRST:
        key, there = place, place < seen
    else:
        key = tl.load(source_ptr + place, mask=place < length, other=-1)
        there = key >= 0
    return key, there


@triton.jit
def _ordered(row_ptr, key, there, wanted):
    """Scores as uint32 of the same order, above 0; 0 where there is no key.

    All keys are alike if they are not wanted, and then no score is read.
    """
    score = tl.load(row_ptr + key, mask=there & wanted, other=0.0)
    score = tl.where(score != score, float("inf"), score)
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.uint32, bitcast=True)
    ordered = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    return tl.where(there, ordered, tl.full([], 0, tl.uint32))


@triton.jit
def _total(flags):
    return tl.reduce(flags.to(tl.int32), 0, tl.standard._sum_combine)


@triton.jit
def _select_kernel(
    scores_ptr,
    source_ptr,
    seen_ptr,
    out_ptr,
    stride_b,
    stride_q,
    keys,
    length,
    topk,
    key_start,
    offset,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    FIRST: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """The keys of one segment of one query."""
    query, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row_ptr = scores_ptr + batch * stride_b + query * stride_q
    row = query * tl.num_programs(1) + batch
    source_ptr += row * length
    result_ptr = out_ptr + (row * tl.num_programs(2) + tl.program_id(2)) * topk
    first = tl.program_id(2) * BLOCK
    if COUNTED:
        seen = tl.load(seen_ptr + query)
    else:
        seen = tl.program_id(0) + offset + 1
    seen = tl.minimum(tl.maximum(seen, 0), keys)
    key, there = _keys(source_ptr, first + tl.arange(0, BLOCK), length, seen, FIRST)
    count = _total(there)
    # All that there are, or those above the k-th; and how many of those equal to it.
    choose = count > topk
    least = tl.full([], 0, tl.uint32)
    wanted = tl.full([], 0, tl.int32)
    if choose:
        values = _ordered(row_ptr, key, there, choose)
        bit = tl.full([], 31, tl.int32)
        while bit >= 0:
            candidate = least | (tl.full([], 1, tl.uint32) << bit)
            number = _total(values >= candidate)
            least = tl.where(number >= topk, candidate, least)
            # Exactly these, whatever the other bits are.
            bit = tl.where(number == topk, -1, bit - 1)
        wanted = topk - _total(values > least)

    place = tl.arange(0, CHUNK)
    above, ties = 0, 0
    for start in range(0, BLOCK, CHUNK):
        own_key, inside = _keys(source_ptr, first + start + place, length, seen, FIRST)
        value = _ordered(row_ptr, own_key, inside, choose)
        greater, tie = value > least, value == least
        # Both counts in one number.
        one = greater.to(tl.int32) + (tie.to(tl.int32) << 16)
        before = tl.associative_scan(one, 0, tl.standard._sum_combine) - one
        ties_before = ties + (before >> 16)
        number = above + (before & 0xFFFF) + tl.minimum(ties_before, wanted)
        own = greater | (tie & (ties_before < wanted))
        tl.store(result_ptr + number, own_key + key_start, mask=own)
        above += _total(greater)
        ties += _total(tie)
    found = tl.minimum(count, topk)
    for start in range(found // CHUNK * CHUNK, topk, CHUNK):
        rest = start + place
        nothing = tl.full([CHUNK], -1, tl.int32)
        tl.store(result_ptr + rest, nothing, mask=(rest >= found) & (rest < topk))
