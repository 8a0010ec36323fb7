"""Batch-invariant batched GEMM: every head's rows times that head's own matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.triton.common import interpreted, narrow, precision, product

# Tokens, outputs and summands of a block; they must not depend on the number of tokens.
_TOKENS, _OUTPUTS, _SUMMANDS = 64, 64, 32


def head_product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply every head by its matrix, in fp32.

    Args:
        x: [T, N, summands], bf16, fp16 or fp32, any strides.
        weight: [N, summands, outputs], in the dtype of ``x``, any strides.

    Returns:
        [T, N, outputs] in the dtype of ``x``.
    """
    tokens, heads, summands = x.shape
    outputs = weight.shape[-1]
    result = x.new_empty(tokens, heads, outputs)
    if not result.numel():
        return result
    grid = (triton.cdiv(tokens, _TOKENS), triton.cdiv(outputs, _OUTPUTS), heads)
    # Triton launches on the current device, whatever the tensors' is.
    with torch.cuda.device_of(x):
        _head_product_kernel[grid](
            x,
            weight,
            result,
            tokens,
            outputs,
            summands,
            *x.stride(),
            *weight.stride(),
            *result.stride(),
            BLOCK_T=_TOKENS,
            BLOCK_C=_OUTPUTS,
            BLOCK_K=_SUMMANDS,
            PRECISION=precision(x.dtype),
            INTERPRETED=interpreted(),
            num_warps=4,
            num_stages=3,
        )
    return result


# Not specialised: one token would get a kernel of its own.
@triton.jit(do_not_specialize=["tokens"])
def _head_product_kernel(
    x_ptr,
    weight_ptr,
    result_ptr,
    tokens,
    outputs,
    summands,
    stride_x_t,
    stride_x_n,
    stride_x_k,
    stride_w_n,
    stride_w_k,
    stride_w_c,
    stride_r_t,
    stride_r_n,
    stride_r_c,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    head = tl.program_id(2).to(tl.int64)
    # [BLOCK_T], [BLOCK_C]
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    output = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    x_rows = x_ptr + head * stride_x_n + token[:, None] * stride_x_t
    w_columns = weight_ptr + head * stride_w_n + output[None, :].to(tl.int64) * stride_w_c
    total = tl.full([BLOCK_T, BLOCK_C], 0.0, tl.float32)
    for start in range(0, summands, BLOCK_K):
        summand = start + tl.arange(0, BLOCK_K)
        there = summand < summands
        x = tl.load(
            x_rows + summand[None, :].to(tl.int64) * stride_x_k,
            mask=(token < tokens)[:, None] & there[None, :],
            other=0.0,
        )
        weight = tl.load(
            w_columns + summand[:, None].to(tl.int64) * stride_w_k,
            mask=there[:, None] & (output < outputs)[None, :],
            other=0.0,
        )
        total = product(x, weight, total, PRECISION, INTERPRETED)
    result = (
        result_ptr
        + head * stride_r_n
        + token[:, None] * stride_r_t
        + output[None, :].to(tl.int64) * stride_r_c
    )
    tl.store(
        result,
        narrow(total, result_ptr.dtype.element_ty, INTERPRETED),
        mask=(token < tokens)[:, None] & (output < outputs)[None, :],
    )
