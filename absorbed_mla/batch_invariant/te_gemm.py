"""The product of TransformerEngine's layers, in place of its ``general_gemm``.

TransformerEngine names what a column-major library sees: layout "TN" is B A^T, "NN" is B A, "NT" is
B^T A, in rows. Megatron's stand-in (0.19.2) copies A and B if they are transposed, rounds to their
dtype before it converts to another one, and sets ``out`` where it should add to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from absorbed_mla.batch_invariant.products import DTYPES

_LAYOUTS = ("TN", "NN", "NT")
# Options that ask for something else than a product.
_REFUSED = ("quantization_params", "gelu", "gelu_in", "ub", "ub_type", "extra_output")


def general_gemm(
    A: Tensor,
    B: Tensor,
    *positional: Any,
    out_dtype: torch.dtype | None = None,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    grad: bool = False,
    accumulate: bool = False,
    **more: Any,
) -> tuple[Tensor, Tensor | None, None, None]:
    """A batch-invariant product with TransformerEngine's arguments.

    Args:
        A: A weight [outputs, inputs] ("TN", "NN"), or the input [tokens, inputs] ("NT"), bf16,
            fp16 or fp32.
        B: The input or the output's gradient, [..., width]; rows are its leading dims.
        positional: A workspace, which older versions pass; not used.
        out_dtype: Of the result; None: that of ``A``. Nothing is rounded in between.
        layout: See above.
        out: Takes the result.
        bias: [outputs]; added, or with ``grad`` the parameter whose gradient is wanted.
        grad: Whether this is a gradient.
        accumulate: Whether the result is added to ``out``.
        more: What else TransformerEngine passes; it must not change the result.

    Returns:
        The result, the bias's gradient or None, and two results of functions that are refused.

    Raises:
        ValueError: For other dtypes and layouts, and for functions beside a product.
    """
    _check(A, B, layout, more)
    if bias is not None and not bias.numel():  # some versions' way to say that there is none
        bias = None
    from absorbed_mla.kernels.invariant.matrix_product import matrix_product

    a, b = A.reshape(-1, A.shape[-1]), B.reshape(-1, B.shape[-1])
    dtype = torch.promote_types(a.dtype, b.dtype)
    left, right = (b.T if layout[1] == "T" else b), (a.T if layout[0] == "T" else a)
    wanted = out.dtype if out is not None else out_dtype or A.dtype
    result = matrix_product(left.to(dtype), right.to(dtype), None if grad else bias, wanted)
    if layout[1] == "N":
        result = result.view(*B.shape[:-1], result.shape[-1])
    if out is not None:
        result = result.view(out.shape)
        result = out.add_(result) if accumulate else out.copy_(result)
    bias_grad = b.sum(0).to(bias.dtype) if grad and bias is not None else None
    return result, bias_grad, None, None


def _check(A: Tensor, B: Tensor, layout: str, more: dict[str, Any]) -> None:
    for name, operand in (("A", A), ("B", B)):
        dtype = getattr(operand, "dtype", None)
        if dtype not in DTYPES:
            raise ValueError(
                f"parity mode's general_gemm needs {name} in bf16, fp16 or fp32; got {dtype}"
            )
    if layout not in _LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(_LAYOUTS)}; got {layout!r}")
    for name in _REFUSED:
        if more.get(name) not in (None, False):
            raise ValueError(f"parity mode's general_gemm needs {name}=None; got {more[name]!r}")
    if more.get("bulk_overlap") or more.get("alpha", 1.0) != 1.0 or more.get("beta"):
        raise ValueError(
            "parity mode's general_gemm needs bulk_overlap=False, alpha=1 and beta=None; got "
            + ", ".join(f"{x}={more.get(x)!r}" for x in ("bulk_overlap", "alpha", "beta"))
        )
