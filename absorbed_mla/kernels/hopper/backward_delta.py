"""Delta of the backward: rowsum(out * grad_out), less the gradient of the LSE."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch

_ROWS = 16


def delta(grad_out: Tensor, grad_lse: Tensor | None, out: Tensor) -> Tensor:
    """The rows' sums of ``out * grad_out``, less ``grad_lse``.

    Args:
        grad_out: [S_q, B, N, C].
        grad_lse: [S_q, B, N] or None.
        out: [S_q, B, N, C].

    Returns:
        fp32 [S_q, B, N].
    """
    grad_out, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad_out, out))
    result = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
    launch(
        _delta_kernel,
        (-(-result.numel() // _ROWS),),
        grad_out,
        result if grad_lse is None else grad_lse.contiguous(),
        out,
        result,
        result.numel(),
        *result.shape[1:],
        *grad_out.stride()[:3],
        *out.stride()[:3],
        C=out.shape[3],
        ROWS=_ROWS,
        WITH_LSE=grad_lse is not None,
    )
    return result


@triton.jit
def _delta_kernel(
    grad_out,
    grad_lse,
    out,
    result,
    rows,
    batches,
    heads,
    grad_out_stride_s,
    grad_out_stride_b,
    grad_out_stride_n,
    out_stride_s,
    out_stride_b,
    out_stride_n,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    # [ROWS]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    head, batch, token = row % heads, row // heads % batches, row // heads // batches
    grad_out += token * grad_out_stride_s + batch * grad_out_stride_b + head * grad_out_stride_n
    out += token * out_stride_s + batch * out_stride_b + head * out_stride_n
    # [ROWS, C]
    column = tl.arange(0, C)[None, :]
    left = tl.load(grad_out[:, None] + column, mask=valid[:, None], other=0.0).to(tl.float32)
    right = tl.load(out[:, None] + column, mask=valid[:, None], other=0.0).to(tl.float32)
    total = tl.sum(left * right, axis=1)
    if WITH_LSE:
        total -= tl.load(grad_lse + row, mask=valid, other=0.0).to(tl.float32)
    tl.store(result + row, total, mask=valid)
