"""MoE token permutation of few tokens: (token, expert) pairs sorted by expert in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.triton_private import sum_combine

# Each choice is compared with all others: from about here on sorting is faster.
MOST_CHOICES = 8192
# Items of a program, few, so that there are many programs; and how many it compares them with at
# once: the least of these that holds all, or the largest. Each is compiled for itself.
_ITEMS, _OTHERS = 16, (64, 256, 1024)


def order_by_expert(
    chosen: Tensor, count: int, first: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows sorted by expert, see ``experts.rows.PermutedTokens``, in one launch.

    Args:
        chosen: Int64 [T, K], contiguous.
        count: How many experts this rank has.
        first: Number of its first one.

    Returns:
        ``choices``, ``tokens``, ``places`` and ``ends``.
    """
    number = chosen.numel()
    choices, tokens = torch.empty(2, number, dtype=torch.int64, device=chosen.device)
    places = torch.empty_like(chosen)
    ends = torch.empty(count, dtype=torch.int32, device=chosen.device)
    others = next((size for size in _OTHERS if number <= size), _OTHERS[-1])
    with torch.cuda.device_of(chosen):
        launch(
            _order_kernel,
            (triton.cdiv(number + count, _ITEMS),),
            *(chosen, choices, tokens, places, ends, len(chosen), count, first),
            TOPK=chosen.shape[1],
            ITEMS=_ITEMS,
            OTHERS=others,
            num_warps=8 if others > 128 else 4,
        )
    return choices, tokens, places, ends


# Tokens are the second row of a tensor.
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["tokens_ptr"])
def _order_kernel(
    chosen_ptr,
    choices_ptr,
    tokens_ptr,
    places_ptr,
    ends_ptr,
    num_tokens,
    count,
    first,
    TOPK: tl.constexpr,
    ITEMS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    # Here, so that it is known to be a multiple of TOPK for any number of tokens.
    number = num_tokens * TOPK
    # Items are the choices, then the ends of experts: behind all choices of the same expert.
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    is_choice, is_end = item < number, (item >= number) & (item < number + count)
    expert = _number_here(chosen_ptr, item, is_choice, count, first)
    expert = tl.where(is_end, item - number, expert)
    before = tl.full([ITEMS], 0, tl.int32)
    for start in range(0, number, OTHERS):
        other = start + tl.arange(0, OTHERS)
        others = _number_here(chosen_ptr, other, other < number, count, first)
        others = tl.where(other < number, others, count + 1)
        less = others[None, :] < expert[:, None]
        earlier = (others[None, :] == expert[:, None]) & (other[None, :] < item[:, None])
        before += tl.reduce((less | earlier).to(tl.int32), 1, sum_combine)
    tl.store(places_ptr + item, before.to(tl.int64), mask=is_choice)
    tl.store(choices_ptr + before, item.to(tl.int64), mask=is_choice)
    tl.store(tokens_ptr + before, (item // TOPK).to(tl.int64), mask=is_choice)
    tl.store(ends_ptr + item - number, before, mask=is_end)


@triton.jit
def _number_here(chosen_ptr, choice, there, count, first):
    """Numbers of experts among this rank's; ``count`` for those of other ranks."""
    expert = tl.load(chosen_ptr + choice, mask=there, other=0).to(tl.int32) - first
    return tl.where((expert < 0) | (expert >= count), count, expert)
