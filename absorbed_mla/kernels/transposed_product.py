"""A^T B, the product of a weight's gradient, which cuBLAS gets wrong for some numbers of rows.

In bf16 and fp16 cuBLAS 13.1 leaves the last row out where there are 64 n + 1 of them (on an H100,
of 3713 and more, depending on the other sizes: docs/limitations.md).
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from absorbed_mla.log_once import times_logged

_logger = logging.getLogger(__name__)
# Rows of a step of the kernels that are wrong.
_STEP = 64


def may_lose_last_row(x: Tensor, rows: int) -> bool:
    """Whether cuBLAS may leave the last of so many rows out of a product over rows of ``x``."""
    return x.is_cuda and x.element_size() == 2 and rows > 1 and rows % _STEP == 1


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a b``, whose sums stay in fp32 (fp64), like the result."""
    if a.is_cuda and a.element_size() == 2:
        return torch.mm(a, b, out_dtype=torch.float32)
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide) @ b.to(wide)


def transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """``a^T b`` in fp32 (fp64), [M, N].

    Args:
        a: [rows, M].
        b: [rows, N], in the dtype of ``a``.
    """
    if not may_lose_last_row(a, len(a)):
        return product(a.t(), b)
    return product(a[:-1].t(), b[:-1]).add_(a[-1].float()[:, None] * b[-1].float())


def warn_of_lost_rows(x: Tensor) -> None:
    """Say once that gradients of other packages' linear layers may miss a token.

    Args:
        x: What the layers get, [S, B, hidden_size].
    """
    rows = x.shape[0] * x.shape[1]
    if not torch.is_grad_enabled() or not may_lose_last_row(x, rows):
        return
    if next(times_logged(_logger, "rows")) == 0:
        _logger.warning(
            f"PyTorch's linear layers may leave the last of {rows} tokens out of the gradients of "
            "their weights: cuBLAS 13.1 does where the tokens of a rank are 64 n + 1; pad them to "
            "an even number (no further warning)"
        )
