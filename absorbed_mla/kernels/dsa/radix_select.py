"""Radix select of the top-k keys of every query in the total order (score, then lower index).

A program has the scores of one query and reads them twice. First, place by place modulo the number
of groups, into the largest of every group: there are at least twice as many groups as keys to
choose, and ``topk`` of these maxima at or above a bound are as many scores at or above it. About
0.7 scores per group are: they are kept, in order, when the scores are read again, and the k-th
largest is sought among them, by halving the range of its bits. Then the keys above it are written,
and of those equal to it the first ones.

Scores may be such that more are at or above the bound than there are groups, as where many are
equal. Then all of the query's scores take the place of those that are kept, and the result is as
exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.triton.common import max_of, sum_before, sum_of

# The largest ``topk``: its groups' maxima are 32 registers of each of 512 threads.
_MOST_KEYS = 8192
# Groups, at least, and for each of the keys to choose; which share more than ``topk`` maxima may
# reach the bound.
_GROUPS, _GROUPS_PER_KEY, _SPARE = 4096, 2, 1 / 16


class _Launch(NamedTuple):
    """How a program goes through its scores.

    Attributes:
        warps: Of the program.
        registers: Of a thread, at most; None for any number.
        segments: Whose keys are kept side by side, each by one warp, 4 places at a time.
        tile: Scores that are read at a time for the maxima.
        chunk: Scores that are read at a time to find and write the last ones.
    """

    warps: int
    registers: int | None
    segments: int
    tile: int
    chunk: int


# Where there are more programs than multiprocessors, several share one. Where each is alone, more
# reads at a time hide what one takes. Both measured on an H200.
_MULTIPROCESSORS = 132
_SHARED = _Launch(warps=8, registers=80, segments=16, tile=8192, chunk=1024)
_ALONE = _Launch(warps=16, registers=None, segments=64, tile=16384, chunk=2048)
# Scores that are kept at a time, of 4096 queries: 128 MiB with their keys.
_KEPT = 2**24


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
        ValueError: If ``topk`` is more than 8192.
    """
    batch, queries, keys = scores.shape
    if topk > _MOST_KEYS:
        raise ValueError(f"topk must be at most {_MOST_KEYS}, got {topk}")
    if out is None:
        out = torch.empty(queries, batch, topk, dtype=torch.int32, device=scores.device)
    if not out.numel():
        return out
    groups = max(_GROUPS, triton.next_power_of_2(_GROUPS_PER_KEY * topk))
    shared = queries * batch > _MULTIPROCESSORS and groups == _GROUPS
    launch = _SHARED if shared else _ALONE
    parts = max(1, min(launch.tile, triton.next_power_of_2(max(keys, 1))) // groups)
    # Where no query has a choice, none is kept.
    step = max(1, min(queries, _KEPT // (batch * groups))) if keys > topk else queries
    kept = step * batch * groups if keys > topk else 1
    kept_keys = torch.empty(kept, dtype=torch.int32, device=scores.device)
    kept_scores = torch.empty(kept, dtype=torch.float32, device=scores.device)
    for first in range(0, queries, step):
        own = slice(first, first + step)
        _select_kernel[(len(out[own]), batch)](
            scores[:, own],
            scores if seen is None else seen[own],
            kept_keys,
            kept_scores,
            out[own],
            *scores.stride()[:2],
            keys,
            topk,
            key_start,
            keys if offset is None else offset + first,
            int(topk * _SPARE),
            GROUPS=groups,
            PARTS=parts,
            SEGMENTS=launch.segments,
            CHUNK=launch.chunk,
            COUNTED=seen is not None,
            num_warps=launch.warps,
            maxnreg=launch.registers,
        )
    return out


@triton.jit
def _scores(source_ptr, place, end):
    """Scores at places before the end, NaN as infinity; elsewhere the lowest."""
    score = tl.load(source_ptr + place, mask=place < end, other=float("-inf"))
    return tl.where(score != score, float("inf"), score)


@triton.jit
def _ordered(score):
    """A score's bits as an int32 of the same order; of -0 just before 0, which no bound tells."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _number(ordered):
    """The score of which these are the bits in order."""
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """The mean of two int32, rounded up."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def _total(numbers):
    return sum_of(numbers.to(tl.int32))


@triton.jit
def _lower_bound(row_ptr, seen, topk, spare, GROUPS: tl.constexpr, PARTS: tl.constexpr):
    """Bits in order that at least ``topk`` scores reach, few more as a rule; and the highest."""
    part, group = tl.arange(0, PARTS), tl.arange(0, GROUPS)
    place = part[:, None] * GROUPS + group[None, :]
    best = tl.full([GROUPS], float("-inf"), tl.float32)
    for start in range(0, seen, PARTS * GROUPS):
        best = tl.maximum(best, max_of(_scores(row_ptr, start + place, seen)))
    low, most = _ordered(-max_of(-best)), _ordered(max_of(best))
    high = most
    while low < high:
        middle = _middle(low, high)
        number = _total(best >= _number(middle))
        high = tl.where(number < topk, middle - 1, high)
        low = tl.where(number < topk, low, middle)
        # Close enough.
        high = tl.where((number >= topk) & (number <= topk + spare), low, high)
    return low, most


@triton.jit
def _reaching(row_ptr, place, lane, length, seen, least):
    """Whether scores of segments, ``lane`` places after their beginnings, reach one: int32."""
    end = tl.where(lane < length, seen, 0)
    return ((_scores(row_ptr, place, end) >= least) & (place < end)).to(tl.int32)


@triton.jit
def _keep(row_ptr, seen, least, keys_ptr, scores_ptr, GROUPS: tl.constexpr, SEGMENTS: tl.constexpr):
    """Writes the keys that reach a score, and their scores, if GROUPS at most; returns how many do.

    A segment of the scores is read by one warp, which so waits for no other.
    """
    length = (seen + SEGMENTS - 1) // SEGMENTS
    # The first axis is a warp's: so is the layout in which Triton stores to scattered places.
    lane = tl.arange(0, 32)[:, None]
    first = tl.arange(0, SEGMENTS)[None, :] * length
    reached = tl.full([32, SEGMENTS], 0, tl.int32)
    for step in range(0, length, 128):
        for part in tl.static_range(4):
            own = lane + step + part * 32
            reached += _reaching(row_ptr, first + own, own, length, seen, least)
    counts = _total(reached)
    count = _total(counts)
    if count <= GROUPS:
        start = sum_before(counts)[None, :]
        for step in range(0, length, 128):
            # Of four places, so that their counts, which are 32 at most, are added up in one go.
            flags = tl.full([32, SEGMENTS], 0, tl.int32)
            for part in tl.static_range(4):
                own = lane + step + part * 32
                flags += _reaching(row_ptr, first + own, own, length, seen, least) << (8 * part)
            before, totals = sum_before(flags), _total(flags)[None, :]
            for part in tl.static_range(4):
                key = first + lane + step + part * 32
                kept = ((flags >> (8 * part)) & 1) > 0
                number = start + ((before >> (8 * part)) & 255)
                tl.store(keys_ptr + number, key, mask=kept)
                tl.store(scores_ptr + number, tl.load(row_ptr + key, mask=kept), mask=kept)
                start += (totals >> (8 * part)) & 255
    # Other threads read them.
    tl.debug_barrier()
    return count


@triton.jit
def _last_score(source_ptr, count, topk, low, high, CHUNK: tl.constexpr):
    """The k-th largest score, or any above which there are fewer and which k reach.

    Returns it, and how many of those equal to it are chosen.
    """
    place = tl.arange(0, CHUNK)
    above = tl.full([], 0, tl.int32)
    while low < high:
        middle = _middle(low, high)
        least = _number(middle)
        reached = tl.full([CHUNK], 0, tl.int32)
        for start in range(0, count, CHUNK):
            reached += (_scores(source_ptr, start + place, count) >= least).to(tl.int32)
        number = _total(reached)
        above = tl.where(number < topk, number, above)
        high = tl.where(number < topk, middle - 1, high)
        low = tl.where(number < topk, low, middle)
        # Exactly these, whatever the other bits are.
        high = tl.where(number == topk, low, high)
        above = tl.where(number == topk, 0, above)
    return _number(low), topk - above


@triton.jit
def _select_kernel(
    scores_ptr,
    seen_ptr,
    kept_keys_ptr,
    kept_scores_ptr,
    out_ptr,
    stride_b,
    stride_q,
    keys,
    topk,
    key_start,
    offset,
    spare,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """The keys of one query."""
    query, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row_ptr = scores_ptr + batch * stride_b + query * stride_q
    row = query * tl.num_programs(1) + batch
    result_ptr = out_ptr + row * topk
    if COUNTED:
        seen = tl.load(seen_ptr + query)
    else:
        seen = tl.program_id(0) + offset + 1
    seen = tl.minimum(tl.maximum(seen, 0), keys)
    place = tl.arange(0, CHUNK)
    if seen <= topk:
        for start in range(0, topk, CHUNK):
            key = tl.where(start + place < seen, start + place + key_start, -1)
            tl.store(result_ptr + start + place, key, mask=start + place < topk)
    else:
        # A group of one score each: the bound is as well the exact one.
        more = tl.where(seen <= GROUPS, 0, spare)
        low, high = _lower_bound(row_ptr, seen, topk, more, GROUPS, PARTS)
        kept_keys_ptr += row * GROUPS
        kept_scores_ptr += row * GROUPS
        bound = _number(low)
        count = _keep(row_ptr, seen, bound, kept_keys_ptr, kept_scores_ptr, GROUPS, SEGMENTS)
        high = tl.where(count == topk, low, high)
        fits = count <= GROUPS
        if fits:
            source_ptr = kept_scores_ptr
        else:
            source_ptr = row_ptr
            count = seen
        last, wanted = _last_score(source_ptr, count, topk, low, high, CHUNK)
        above, ties = 0, 0
        for start in range(0, count, CHUNK):
            own = start + place
            inside = own < count
            score = _scores(source_ptr, own, count)
            key = tl.where(fits, tl.load(kept_keys_ptr + own, mask=inside & fits, other=0), own)
            greater, tie = (score > last) & inside, (score == last) & inside
            # Both counts in one number.
            one = greater.to(tl.int32) + (tie.to(tl.int32) << 16)
            before = sum_before(one)
            ties_before = ties + (before >> 16)
            number = above + (before & 0xFFFF) + tl.minimum(ties_before, wanted)
            chosen = greater | (tie & (ties_before < wanted))
            tl.store(result_ptr + number, key + key_start, mask=chosen)
            both = _total(one)
            above += both & 0xFFFF
            ties += both >> 16
