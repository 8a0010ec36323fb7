"""Clears results of padding tokens, which are in no request: 0, LSE -inf."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.triton.common import interpreted, narrow
from absorbed_mla.kernels.triton_private import sum_combine

# Requests that a program compares with its token at once. One number, whatever the batch: a kernel
# compiled for another would be compiled while an engine serves.
REQUESTS_AT_A_TIME = 128


def clear_padding(query_starts: Tensor, query_lengths: Tensor, out: Tensor, lse: Tensor) -> None:
    """Clear the results of tokens that are in no request; ``combine`` does so, too.

    Args:
        query_starts: As in ``inference.rows.Rows``; int32 [Q].
        query_lengths: Likewise.
        out: [T, N, C], contiguous.
        lse: [T, N], contiguous.
    """
    tokens, heads, kv_lora_rank = out.shape
    launch(
        _padding_kernel,
        (tokens,),
        query_starts,
        query_lengths,
        out,
        lse,
        len(query_starts),
        heads,
        REQUESTS=REQUESTS_AT_A_TIME,
        C=kv_lora_rank,
        INTERPRETED=interpreted(),
        num_warps=4,
    )


@triton.jit(
    do_not_specialize=["num_requests", "heads"],
    do_not_specialize_on_alignment=["query_starts_ptr", "lengths_ptr"],
)
def _padding_kernel(
    query_starts_ptr,
    lengths_ptr,
    out_ptr,
    lse_ptr,
    num_requests,
    heads,
    REQUESTS: tl.constexpr,
    C: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    requests = query_starts_ptr, lengths_ptr, num_requests
    clear_if_padding(requests, out_ptr, lse_ptr, tl.program_id(0), heads, REQUESTS, C, INTERPRETED)


@triton.jit
def clear_if_padding(
    requests,
    out_ptr,
    lse_ptr,
    token,
    heads,
    REQUESTS: tl.constexpr,
    C: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write output 0 and LSE -inf of a token that is in no request."""
    query_starts_ptr, lengths_ptr, num_requests = requests
    members = 0
    for first in range(0, num_requests, REQUESTS):
        index = first + tl.arange(0, REQUESTS)
        there = index < num_requests
        start = tl.load(query_starts_ptr + index, mask=there, other=0)
        length = tl.load(lengths_ptr + index, mask=there, other=0)
        member = (token >= start) & (token < start + length)
        members += tl.reduce(member.to(tl.int32), 0, sum_combine)
    if members == 0:
        for head in range(heads):
            row = token.to(tl.int64) * heads + head
            nothing = narrow(tl.full([C], 0.0, tl.float32), out_ptr.dtype.element_ty, INTERPRETED)
            tl.store(out_ptr + row * C + tl.arange(0, C), nothing)
            tl.store(lse_ptr + row, float("-inf"))
