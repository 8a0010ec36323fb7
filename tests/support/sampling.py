"""The weights that kernels give to tokens; imported where Triton's interpreter may be."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.sampling.numbers import TEMPERATURE, least_share, load_number
from absorbed_mla.kernels.sampling.weights import weights_of


def kernel_weights(logits: Tensor, numbers: Tensor) -> Tensor:
    """What ``weights_of`` yields for rows without NaN, int64 [rows, vocabulary]."""
    weights = torch.empty(logits.shape, dtype=torch.int64, device=logits.device)
    most = logits.amax(-1).float()
    _weights_kernel[(len(logits),)](
        logits,
        most,
        numbers,
        weights,
        logits.stride(0),
        *numbers.stride(),
        logits.shape[1],
        BLOCK=triton.next_power_of_2(logits.shape[1]),
    )
    return weights


@triton.jit
def _weights_kernel(
    logits_ptr,
    most_ptr,
    numbers_ptr,
    weights_ptr,
    stride,
    stride_n,
    stride_r,
    size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * stride + token, mask=token < size, other=float("-inf"))
    temperature = load_number(numbers_ptr, row, stride_n, stride_r, TEMPERATURE).to(tl.float32)
    min_p = least_share(numbers_ptr, row, stride_n, stride_r)
    most = tl.load(most_ptr + row)
    weights = weights_of(logits.to(tl.float32), token < size, most, temperature, min_p)
    tl.store(weights_ptr + row * size + token, weights, mask=token < size)
