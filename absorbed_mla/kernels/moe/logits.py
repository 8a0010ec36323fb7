"""Router logits of few tokens in fp32, from operands as they are, in parts that add up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.moe.choice import MOST_PARTIAL_LOGITS
from absorbed_mla.kernels.triton.common import interpreted, precision, product

# Summands of a step of a program, in bf16.
_SUMMANDS = 256
# Tokens of a tile, the tokens of a step up to which it is taken, and experts of a tile. Tiles are
# small, since there are few of them: what counts is how many programs read the weights.
_TILES = ((16, 16, 16), (32, 128, 32), (64, None, 32))
# More parts than these keep no more multiprocessors busy.
_PROGRAMS = 264

# Of a step that decodes, at most. With more, the copies in fp32 are a small part of the product.
_MOST_TOKENS = 512


def is_few(tokens: int) -> bool:
    """Whether :func:`partial_logits` is the faster one for that many tokens."""
    return tokens <= _MOST_TOKENS


def partial_logits(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` in fp32, whose sum over parts of the summands ``choose_experts`` takes.

    Args:
        x: [T, H], the last axis contiguous.
        weight: [E, H], contiguous, of the same dtype.

    Returns:
        fp32 [P, T, E]; P depends on sizes alone.
    """
    # A plain tensor, for which a launch is cheap.
    (tokens, width), experts, weight = x.shape, len(weight), weight.detach()
    tile, _, columns = next(t for t in _TILES if t[1] is None or tokens <= t[1])
    columns = min(columns, max(16, 1 << (experts - 1).bit_length()))
    tiles = -(-tokens // tile) * -(-experts // columns)
    summands = _SUMMANDS * 2 // x.element_size()
    steps = -(-width // summands)
    most = max(1, MOST_PARTIAL_LOGITS >> (experts - 1).bit_length())
    steps_of_part = -(-steps // max(1, min(most, -(-_PROGRAMS // max(1, tiles)))))
    parts = -(-steps // steps_of_part)
    out = torch.empty(parts, tokens, experts, dtype=torch.float32, device=x.device)
    if out.numel():
        # Triton launches on the current device, whatever the tensors' is.
        with torch.cuda.device_of(x):
            launch(
                _logits_kernel,
                (-(-experts // columns), -(-tokens // tile), parts),
                *(x, weight, out, tokens, experts, width, x.stride(0), steps_of_part),
                TOKENS=tile,
                EXPERTS=columns,
                SUMMANDS=summands,
                EVEN=width % summands == 0,
                PRECISION=precision(x.dtype),
                INTERPRETED=interpreted(),
                num_warps=4,
                num_stages=3,
            )
    return out


@triton.jit(do_not_specialize=["tokens", "experts", "steps_of_part"])
def _logits_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    tokens,
    experts,
    width,
    stride,
    steps_of_part,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SUMMANDS: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    part = tl.program_id(2)
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    of_token = x_ptr + token.to(tl.int64)[:, None] * stride
    of_expert = weight_ptr + expert.to(tl.int64)[None, :] * width
    known, there = (expert < experts)[None, :], (token < tokens)[:, None]
    total = tl.full([TOKENS, EXPERTS], 0.0, tl.float32)
    first = part * steps_of_part * SUMMANDS
    end = tl.minimum(first + steps_of_part * SUMMANDS, width)
    for start in range(first, end, SUMMANDS):
        summand = start + tl.arange(0, SUMMANDS)
        left_mask, right_mask = there, known
        if not EVEN:
            left_mask &= (summand < width)[None, :]
            right_mask &= (summand < width)[:, None]
        left = tl.load(of_token + summand[None, :], mask=left_mask, other=0.0)
        right = tl.load(of_expert + summand[:, None], mask=right_mask, other=0.0)
        total = product(left, right, total, PRECISION, INTERPRETED)
    row = part.to(tl.int64) * tokens + token
    tl.store(out_ptr + row[:, None] * experts + expert[None, :], total, mask=there & known)
