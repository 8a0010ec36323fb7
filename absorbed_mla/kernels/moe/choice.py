"""Router top-k: the experts of every token from its scores, in one pass over them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.triton.common import max_of, sum_of

# Numbers that the one warp of a token loads: parts, times experts rounded up to a power of two.
MOST_PARTIAL_LOGITS = 2048


def choose_experts(
    logits: Tensor,
    topk: int,
    *,
    softmax: bool,
    bias: Tensor | None,
    groups: int | None,
    group_topk: int | None,
    scale: float | None,
    normalize: bool | None = None,
    group_score_topk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Top-k experts as DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437) choose them.

    Of equal scores the expert with the lower number is the greater one.

    Args:
        logits: [T, E], contiguous, any float dtype; or parts [P, T, E] that add up to them.
        topk: K.
        softmax: Whether scores are softmax(logits); else sigmoid(logits).
        bias: [E], added to the scores for the choice alone.
        groups: Of experts, equally many in each; None for one group.
        group_topk: Groups whose experts may be chosen: those with the greatest sums of their
            ``group_score_topk`` greatest scores. None: all.
        scale: What scores are multiplied by at last.
        normalize: Whether chosen scores are divided by their sum. None: sigmoid scores of several
            experts are.
        group_score_topk: None for Megatron's ``topk // group_topk``.

    Returns:
        Scores [T, K] in the dtype of ``logits``, and numbers of experts, int64 [T, K].
    """
    tokens, experts = logits.shape[-2:]
    parts = len(logits) if logits.dim() == 3 else 1
    scores = logits.new_empty(tokens, topk)
    chosen = torch.empty(tokens, topk, dtype=torch.int64, device=logits.device)
    limited = groups if groups and group_topk else 1
    size = experts // limited
    with torch.cuda.device_of(logits):
        launch(
            _choice_kernel,
            (tokens,),
            *(logits, logits if bias is None else bias, scores, chosen),
            *(tokens, parts, limited, size, scale or 1.0),
            PARTS=triton.next_power_of_2(parts),
            GROUPS=triton.next_power_of_2(limited),
            SIZE=triton.next_power_of_2(size),
            GROUP_TOPK=group_topk if limited > 1 else 0,
            OF_GROUP=(group_score_topk or topk // group_topk) if limited > 1 else 0,
            TOPK=topk,
            SLOTS=triton.next_power_of_2(topk),
            SOFTMAX=softmax,
            NORMALIZE=(not softmax and topk > 1) if normalize is None else normalize,
            BIASED=bias is not None,
            num_warps=1,
        )
    return scores, chosen


@triton.jit(do_not_specialize=["tokens", "parts"])
def _choice_kernel(
    logits_ptr,
    bias_ptr,
    scores_ptr,
    chosen_ptr,
    tokens,
    parts,
    groups,
    size,
    scale,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP_TOPK: tl.constexpr,
    OF_GROUP: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BIASED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUPS), tl.arange(0, SIZE)
    there = (group < groups)[:, None] & (member < size)[None, :]
    expert = group[:, None] * size + member[None, :]
    # Not a tensor of all parts summed over its first axis: its lanes would hold copies of the sums
    # between different ones, which Triton 3.6 counts wrongly when it reduces them reshaped.
    logits = tl.full([GROUPS, SIZE], 0.0, tl.float32)
    for part in tl.static_range(PARTS):
        pointers = logits_ptr + (part * tokens + token) * groups * size + expert
        logits += tl.load(pointers, mask=there & (part < parts), other=0.0).to(tl.float32)
    logits = tl.where(there, logits, -float("inf"))
    if SOFTMAX:
        score = tl.exp(logits - max_of(max_of(logits, 1), 0))
        score = score / sum_of(sum_of(score, 1), 0)
    else:
        score = 1 / (1 + tl.exp(-logits))
    key = score
    if BIASED:
        key += tl.load(bias_ptr + expert, mask=there, other=0.0).to(tl.float32)
    # NaN is the least of all: what is chosen are numbers of experts, whatever the scores.
    key = tl.where(there, tl.where(key == key, key, -1e30), -float("inf"))
    if GROUP_TOPK > 0:
        rest = key
        total = tl.full([GROUPS], 0.0, tl.float32)
        for _ in tl.static_range(OF_GROUP):
            greatest = max_of(rest, 1)
            total += greatest
            first = _first(rest == greatest[:, None], member[None, :], 1, SIZE)
            rest = tl.where(member[None, :] == first[:, None], -float("inf"), rest)
        total = tl.where(group < groups, total, -float("inf"))
        taken = group < 0
        for _ in tl.static_range(GROUP_TOPK):
            first = _first(total == max_of(total, 0), group, 0, GROUPS)
            taken |= group == first
            total = tl.where(group == first, -float("inf"), total)
        key = tl.where(taken[:, None], key, -float("inf"))
    key, score = tl.reshape(key, [GROUPS * SIZE]), tl.reshape(score, [GROUPS * SIZE])
    expert = tl.reshape(expert, [GROUPS * SIZE])
    place, slot = tl.arange(0, GROUPS * SIZE), tl.arange(0, SLOTS)
    chosen = tl.full([SLOTS], 0, tl.int32)
    found = tl.full([SLOTS], 0.0, tl.float32)
    for k in tl.static_range(TOPK):
        first = _first(key == max_of(key, 0), place, 0, GROUPS * SIZE)
        chosen = tl.where(slot == k, sum_of(tl.where(place == first, expert, 0), 0), chosen)
        found = tl.where(slot == k, sum_of(tl.where(place == first, score, 0.0), 0), found)
        key = tl.where(place == first, -float("inf"), key)
    if NORMALIZE:
        found = found / (sum_of(found, 0) + 1e-20)
    out = token * TOPK + slot
    tl.store(chosen_ptr + out, chosen.to(tl.int64), mask=slot < TOPK)
    found = (found * scale).to(scores_ptr.dtype.element_ty)
    tl.store(scores_ptr + out, found, mask=slot < TOPK)


@triton.jit
def _first(wanted, place, axis: tl.constexpr, END: tl.constexpr):
    """The least of the places that are wanted."""
    return -max_of(tl.where(wanted, -place, -END), axis)
