"""Vectorised atomics: one instruction adds four columns to rows in memory.

A thread has columns 2t, 2t + 1 (t = 0 .. 3) of every 8 in a row of a product. The right operand's
columns are put in another order before the product, so that what the thread has in two
neighbouring groups of 8 is four columns that lie next to each other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.triton.common import interpreted


def adds_quads(operand: Tensor) -> bool:
    """Whether products of such operands can be added four columns at a time."""
    if operand.dtype == torch.float32 or operand.shape[-1] % 16:
        return False
    if interpreted():
        return True
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 90


@triton.jit
def for_quads(operand):
    """The operand [K, W] with columns 16 a + 4 t + 2 g + j at 16 a + 8 g + 2 t + j."""
    K: tl.constexpr = operand.shape[0]
    W: tl.constexpr = operand.shape[1]
    parts = tl.reshape(operand, [K, W // 16, 4, 2, 2])
    return tl.reshape(tl.permute(parts, [0, 1, 3, 2, 4]), [K, W])


@triton.jit
def add_quads(pointer, rows, there, values, INTERPRETED: tl.constexpr):
    """Add a product [M, W] with such an operand to fp32 rows at int64 offsets [M] where there."""
    M: tl.constexpr = values.shape[0]
    W: tl.constexpr = values.shape[1]
    parts = tl.permute(tl.reshape(values, [M, W // 16, 2, 4, 2]), [0, 1, 3, 2, 4])
    even, odd = tl.split(parts)
    first, third = tl.split(even)  # [M, W // 16, 4]
    second, fourth = tl.split(odd)
    column = tl.arange(0, W // 16)[:, None] * 16 + tl.arange(0, 4)[None, :] * 4
    pointers = pointer + rows[:, None, None] + column[None, :, :]
    if INTERPRETED:
        mask = there[:, None, None]
        tl.atomic_add(pointers, first, mask=mask, sem="relaxed")
        tl.atomic_add(pointers + 1, second, mask=mask, sem="relaxed")
        tl.atomic_add(pointers + 2, third, mask=mask, sem="relaxed")
        tl.atomic_add(pointers + 3, fourth, mask=mask, sem="relaxed")
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred there;
            setp.ne.s32 there, $2, 0;
            @there red.relaxed.gpu.global.add.v4.f32 [$1], {$3, $4, $5, $6};
            mov.u32 $0, 0;
            }""",
            "=r,l,r,r,r,r,r",
            [
                pointers.to(tl.int64),
                tl.broadcast_to(there.to(tl.int32)[:, None, None], first.shape),
                first,
                second,
                third,
                fourth,
            ],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
