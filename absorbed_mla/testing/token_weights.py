"""Softmax weights of tokens as the sampling kernels compute them, for tests of the kernels.

Imported where Triton's interpreter may be.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.sampling.row_parameters import TEMPERATURE, load_min_p, load_parameter
from absorbed_mla.kernels.sampling.weights import load_block, weights_of

_BLOCK = 1024


def kernel_weights(logits: Tensor, parameters: Tensor) -> Tensor:
    """What ``weights_of`` yields, int64 [rows, vocabulary].

    Args:
        logits: bf16, fp16 or fp32 [rows, vocabulary] without NaN, last axis contiguous.
        parameters: float64 [6, rows], see ``serving/sampling/device_sampler.py``.
    """
    weights = torch.empty(logits.shape, dtype=torch.int64, device=logits.device)
    most = logits.amax(-1).float()
    grid = (len(logits), triton.cdiv(logits.shape[1], _BLOCK))
    _weights_kernel[grid](
        logits,
        most,
        parameters,
        weights,
        logits.stride(0),
        *parameters.stride(),
        logits.shape[1],
        BLOCK=_BLOCK,
    )
    return weights


@triton.jit
def _weights_kernel(
    logits_ptr,
    most_ptr,
    parameters_ptr,
    weights_ptr,
    stride,
    stride_parameter,
    stride_row,
    vocabulary,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits, inside = load_block(logits_ptr + row * stride, tl.program_id(1), vocabulary, BLOCK)
    temperature = load_parameter(parameters_ptr, row, stride_parameter, stride_row, TEMPERATURE)
    min_p = load_min_p(parameters_ptr, row, stride_parameter, stride_row)
    most = tl.load(most_ptr + row)
    weights = weights_of(logits, inside, most, temperature.to(tl.float32), min_p)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(weights_ptr + row * vocabulary + token, weights, mask=inside)
