"""Drawing tokens by kernels, beside the definition token by token."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.sampling.numbers import TEMPERATURE, least_share, load_number
from absorbed_mla.kernels.sampling.weights import weights_of

# Of a row that has no filters, and takes the first token with a weight.
PLAIN = {"temperature": 1.0, "random": 0.0, "min_p": 0.0, "top_k": 2**20, "top_p": 1.0, "sampled": 1}


def table_of(rows: list[dict], vocabulary: int, device: torch.device | str = "cpu") -> Tensor:
    """The numbers of rows, each those of ``PLAIN`` with changes, float64 [6, rows]."""
    found = [{**PLAIN, **row} for row in rows]
    for row in found:
        row["top_k"] = min(row["top_k"], vocabulary)
    return torch.tensor([list(row.values()) for row in found], dtype=torch.float64).t().to(device)


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
    logits_ptr, most_ptr, numbers_ptr, weights_ptr, stride, stride_n, stride_r, size, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * stride + token, mask=token < size, other=float("-inf"))
    temperature = load_number(numbers_ptr, row, stride_n, stride_r, TEMPERATURE).to(tl.float32)
    min_p = least_share(numbers_ptr, row, stride_n, stride_r)
    most = tl.load(most_ptr + row)
    weights = weights_of(logits.to(tl.float32), token < size, most, temperature, min_p)
    tl.store(weights_ptr + row * size + token, weights, mask=token < size)


def kept(logits: Tensor, weights: Tensor, top_k: int, top_p: float) -> list[int]:
    """The tokens of a row that its filters leave, the most likely one first."""
    number = np.arange(len(logits))
    order = np.lexsort((number, -logits.float().cpu().numpy()))[:top_k]
    values = [int(weights[token]) for token in order]
    total, before, found = sum(values), 0, []
    for token, value in zip(order.tolist(), values):
        if not value or before >= top_p * total:
            break
        found.append(token)
        before += value
    return found


def drawn(logits: Tensor, weights: Tensor, numbers: Tensor) -> int:
    """The token of a row, by exact sums."""
    _, random, _, top_k, top_p, sampled = numbers.tolist()
    if not sampled:
        return int(logits.float().argmax())
    left = sorted(kept(logits, weights, int(top_k), top_p))
    target = int(random * sum(int(weights[token]) for token in left))
    for token in left:
        target -= int(weights[token])
        if target < 0:
            return token
    raise AssertionError("no token")
