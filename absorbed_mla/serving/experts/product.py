"""The grouped GEMM of permuted tokens with their experts' weights, and where it can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from absorbed_mla.batch_invariant import is_enabled, parts
from absorbed_mla.kernels.invariant.tiles import MOST_LEAVES, PART

# It loops over groups on other GPUs, with sizes that it fetches to the host.
_CAPABILITIES = (9, 10)
# What parity mode has kernels for.
_INVARIANT_DTYPES = (torch.bfloat16, torch.float16)
# Bytes of a row of an operand must be a multiple of these.
_ALIGNMENT = 16


def why_not_grouped(
    device: torch.device,
    dtype: torch.dtype,
    widths: Mapping[str, int],
    *,
    parity: bool = False,
    tensor_parallel_parts: int | None = None,
) -> str | None:
    """Why :func:`grouped_product` cannot run without waiting for the device; None if it can.

    Args:
        device: Of the model.
        dtype: Of rows and weights.
        widths: Name -> columns of the operands.
        parity: Whether it is to run in parity mode, by this package's kernel alone.
        tensor_parallel_parts: Of the mode.
    """
    if device.type == "cpu":
        return None
    if parity:
        if (tensor_parallel_parts or 1) > MOST_LEAVES:
            return (
                f"a GPU needs {parts.OPTION} of at most {MOST_LEAVES}, got {tensor_parallel_parts}"
            )
        accepted = dtype in _INVARIANT_DTYPES
        return None if accepted else f"in parity mode a GPU needs bfloat16 or float16, not {dtype}"
    if dtype != torch.bfloat16:
        return f"PyTorch's grouped product on a GPU needs bfloat16, and the model is in {dtype}"
    if _operator() is None:
        return f"PyTorch {torch.__version__} has no grouped product (2.10 and newer have)"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in _CAPABILITIES:
        return f"PyTorch has no grouped product for GPUs of compute capability {major}.{minor}"
    per_row = _ALIGNMENT // dtype.itemsize
    odd = [f"{name} {width}" for name, width in widths.items() if width % per_row]
    return f"{', '.join(odd)} must be a multiple of {per_row}" if odd else None


def grouped_product(
    x: Tensor,
    weights: Tensor,
    ends: Tensor,
    tokens: Tensor | None = None,
    *,
    row_parallel: bool = False,
) -> Tensor:
    """``rows[a:b] @ weights[e].T`` for the rows a to b of each expert e.

    On a GPU the weights of experts without rows are not read, and nothing waits for the device. In
    parity mode each expert's product is that of PyTorch's ``mm`` in the mode, to the bit, or, where
    ``tensor_parallel_parts`` is fixed, of Megatron's parallel layers.

    Args:
        x: The rows [R, K], those of an expert together; or what they are taken from.
        weights: [E, N, K].
        ends: Int32 [E], the row behind the last one of each expert.
        tokens: Int64 [R], where in ``x`` each row is; None: there are the rows.
        row_parallel: Whether parts are of the summands, not of the columns of gates and of
            up-projections.

    Returns:
        [R, N]; rows behind the last end are undefined.

    Raises:
        ValueError: If there are no equal parts.
    """
    count = len(x if tokens is None else tokens)
    if not count:
        return x.new_empty(0, weights.shape[1])
    if x.is_cuda:
        # Imported here, because machines without a GPU need not have Triton.
        from absorbed_mla.kernels.invariant.grouped_product import grouped_product as invariant
        from absorbed_mla.kernels.moe.skinny_gemm import few_rows_product, is_few

        if is_enabled(x.device):
            order = _order_of_sums(x.shape[1], row_parallel)
            return invariant(x.contiguous(), weights, ends, tokens, **order)
        if is_few(count, len(weights)):
            return few_rows_product(x.contiguous(), weights, ends, tokens)
    rows = x if tokens is None else x.index_select(0, tokens)
    if not x.is_cuda:
        return _one_by_one(rows, weights, ends.tolist(), row_parallel)
    operator = _operator()
    assert operator is not None, "asked for by why_not_grouped"
    return operator(rows, weights.transpose(1, 2), offs=ends)


def _operator() -> Callable[..., Tensor] | None:
    """PyTorch's grouped product; before 2.10 it was private."""
    return getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def _order_of_sums(summands: int, row_parallel: bool) -> dict[str, Any]:
    """What the kernel is told of it where the number of parts is fixed."""
    number = parts.fixed.count
    if number is None:
        return {}
    if not row_parallel:
        return {"part": PART}
    parts.split_size(summands, number)
    return {"leaves": number}


def _one_by_one(rows: Tensor, weights: Tensor, ends: list[int], row_parallel: bool) -> Tensor:
    """For a CPU, where nothing waits for a device: as Megatron's experts compute it."""
    out = rows.new_empty(len(rows), weights.shape[1])
    for weight, begin, end in zip(weights, [0, *ends], ends):
        if end > begin:
            out[begin:end] = _of_expert(rows[begin:end], weight.t(), row_parallel)
    return out


def _of_expert(rows: Tensor, weight: Tensor, row_parallel: bool) -> Tensor:
    number = parts.fixed.count
    if number is None:
        return rows @ weight
    if row_parallel:
        return parts.summed_product(rows, weight, number, dtype=rows.dtype)
    return parts.side_by_side(rows, weight, 2 * number)
