"""Kernels of ``absorbed_mla.output_gate``: the product with a sigmoid, and its gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.triton.common import interpreted, narrow, row_sum

# Values that a program of 128 threads computes.
_NUMBERS = 4096


def gate_forward(x: Tensor, logits: Tensor) -> Tensor:
    """``x * sigmoid(logits)`` in fp32, rounded once to the dtype of ``x``.

    Args:
        x: [..., channels].
        logits: [..., gates]; a gate is that of ``channels / gates`` channels side by side.
    """
    x, logits = x.contiguous(), logits.contiguous()
    out = torch.empty_like(x)
    _launch(_forward_kernel, x, logits, out)
    return out


def gate_backward(grad: Tensor, x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of what :func:`gate_forward` took, in their dtypes."""
    grad, x, logits = grad.contiguous(), x.contiguous(), logits.contiguous()
    dx, d_logits = torch.empty_like(x), torch.empty_like(logits)
    _launch(_backward_kernel, x, logits, grad, dx, d_logits)
    return dx, d_logits


def _launch(kernel, x: Tensor, logits: Tensor, *others: Tensor) -> None:
    gates = logits.numel()
    if not gates:
        return
    width = x.numel() // gates
    columns = triton.next_power_of_2(width)
    rows = max(_NUMBERS // columns, 1)
    with torch.cuda.device_of(x):
        launch(
            kernel,
            (triton.cdiv(gates, rows),),
            x,
            logits,
            *others,
            gates,
            WIDTH=width,
            COLUMNS=columns,
            ROWS=rows,
            INTERPRETED=interpreted(),
            num_warps=4,
        )


@triton.jit(do_not_specialize=["gates"])
def _forward_kernel(
    x_ptr,
    logits_ptr,
    out_ptr,
    gates,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # [ROWS], [ROWS, COLUMNS]
    gate, there, place, inside = _places(gates, WIDTH, COLUMNS, ROWS)
    share = _sigmoid(tl.load(logits_ptr + gate, mask=there, other=0.0).to(tl.float32))
    value = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32) * share[:, None]
    tl.store(out_ptr + place, narrow(value, out_ptr.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit(do_not_specialize=["gates"])
def _backward_kernel(
    x_ptr,
    logits_ptr,
    grad_ptr,
    dx_ptr,
    d_logits_ptr,
    gates,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    gate, there, place, inside = _places(gates, WIDTH, COLUMNS, ROWS)
    logit = tl.load(logits_ptr + gate, mask=there, other=0.0).to(tl.float32)
    share = _sigmoid(logit)
    grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    dx = narrow(grad * share[:, None], dx_ptr.dtype.element_ty, INTERPRETED)
    tl.store(dx_ptr + place, dx, mask=inside)
    # Not 1 - share, which is rounded where the gate is open.
    d_logit = row_sum(grad * x) * share * _sigmoid(-logit)
    d_logit = narrow(d_logit, d_logits_ptr.dtype.element_ty, INTERPRETED)
    tl.store(d_logits_ptr + gate, d_logit, mask=there)


@triton.jit
def _places(gates, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Gates of a program, whether there are as many, their channels, and likewise."""
    gate = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there, column = gate < gates, tl.arange(0, COLUMNS)[None, :]
    return gate, there, gate[:, None] * WIDTH + column, there[:, None] & (column < WIDTH)


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))
