"""The Hadamard transform of the last channels, as a matrix product."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor


def hadamard_transform(x: Tensor) -> Tensor:
    """Multiply the last dim by the Hadamard matrix of its size over the root of the size.

    The matrix is orthogonal and symmetric, in Sylvester's order: entry (i, j) is -1 to the number
    of ones in the binary ``i & j``.

    Args:
        x: [..., D]; D is a power of two.

    Returns:
        [..., D] in the dtype of ``x``; computed in fp32 (fp64 for fp64) and rounded once.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    matrix = _matrix(x.shape[-1], compute, x.device)
    return (x.to(compute) @ matrix).to(x.dtype)


@functools.lru_cache(maxsize=8)
def _matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The scaled matrix [size, size]; every indexer of a model needs the same."""
    assert size > 0 and not size & (size - 1), "DSAConfig accepts powers of two only"
    # A matrix made during generation is used in training as well.
    with torch.inference_mode(False):
        pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while len(matrix) < size:
            matrix = torch.kron(pair, matrix)
        return (matrix / math.sqrt(size)).to(device, dtype)
