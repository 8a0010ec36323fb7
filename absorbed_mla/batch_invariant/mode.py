"""Switch the operators of this process to batch-invariant ones.

They are this package's. On a GPU Megatron's mode
(``megatron.core.transformer.custom_layers.batch_invariant_kernels``) installs them, see
``megatron_operators.py``, beside a few of its own; for the CPU Megatron has none.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from megatron.core.transformer.custom_layers import batch_invariant_kernels as megatron
from torch import Tensor

from absorbed_mla.batch_invariant import (
    collectives,
    megatron_operators,
    norms,
    parallel_linear,
    parts,
    products,
    te_gemm,
)
from absorbed_mla.batch_invariant.cross_entropy import VocabParallelCrossEntropy
from absorbed_mla.batch_invariant.gradients import exact_grad_norm, require_complete_gradients
from absorbed_mla.kernels.invariant import cpu
from absorbed_mla.kernels.invariant.topk import topk

# What Megatron's mode installs on a GPU in the place of its own.
OPERATORS = {
    megatron_operators.MM: products.mm,
    megatron_operators.ADDMM: products.addmm,
    megatron_operators.TE_GEMM: te_gemm.general_gemm,
    megatron_operators.TE_RMS_NORM: norms.TERMSNorm,
    megatron_operators.TE_NORMALIZATION: norms.apply_normalization,
}
# What takes the place of Megatron's own, given that, where the number of parts is fixed.
_OF_PARTS = {
    megatron_operators.COLUMN: lambda _: parallel_linear.column_linear,
    megatron_operators.ROW: lambda _: parallel_linear.row_linear,
    megatron_operators.ROUTER: lambda _: parallel_linear.router_linear,
    megatron_operators.EXPERT: parallel_linear.expert_forward,
    megatron_operators.CROSS_ENTROPY: lambda _: VocabParallelCrossEntropy,
    megatron_operators.GRADIENTS: lambda _: require_complete_gradients,
    megatron_operators.GRAD_NORM: lambda theirs: partial(exact_grad_norm, theirs),
}
# Device type -> the library that holds the operators replaced on it.
_replaced: dict[str, torch.library.Library] = {}


def is_enabled(device: torch.device) -> bool:
    """Whether operators on devices of this type are batch-invariant."""
    if device.type == "cuda":
        # Perhaps switched on by Megatron's own function, with its operators; ``require_enabled``
        # replaces those and adds what is missing.
        return megatron.is_batch_invariant_mode_enabled()
    return device.type in _replaced


def enable_batch_invariant_mode(
    device_type: str | None = None, tensor_parallel_parts: int | None = None
) -> None:
    """Make products, norms and activations of this process batch-invariant.

    It holds for the whole process, other packages' modules too, until
    :func:`disable_batch_invariant_mode`, and is slower: see ``docs/parity.md``.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``; None: a GPU where there is one.
        tensor_parallel_parts: A power of 2. Tensor-parallel sums, also on one rank, are then made
            by a tree over so many parts, and logits, losses and gradients are the same bits at
            every tensor-parallel size that divides it; slower. None: as before, at first not so.

    Raises:
        ValueError: For another device or number, or a release of Megatron that makes sums over
            ranks by other functions.
    """
    device_type = _device_type(device_type)
    megatron_operators.require_sums()
    if tensor_parallel_parts is not None:
        megatron_operators.require_parts()
        parts.set_count(tensor_parallel_parts)
        megatron_operators.replace_for_parts(_OF_PARTS)
    if device_type == "cuda":
        megatron_operators.enable(OPERATORS)
    if device_type not in _replaced:
        _replaced[device_type] = _replace(device_type)
    megatron_operators.replace_sums(collectives.reduce_by_tree, collectives.reduce_scatter_by_tree)


def disable_batch_invariant_mode(device_type: str | None = None) -> None:
    """Undo :func:`enable_batch_invariant_mode`."""
    device_type = _device_type(device_type)
    if device_type == "cuda":
        megatron_operators.disable()
    if device_type in _replaced:
        _replaced.pop(device_type)._destroy()
    if not _replaced:
        megatron_operators.restore_sums()
        megatron_operators.restore_for_parts()
        parts.set_count(None)


@contextlib.contextmanager
def batch_invariant_mode(
    device_type: str | None = None, tensor_parallel_parts: int | None = None
) -> Iterator[None]:
    """:func:`enable_batch_invariant_mode` in a ``with`` block; it stays on if it was on."""
    was_on = is_enabled(torch.device(_device_type(device_type)))
    count = parts.fixed.count
    enable_batch_invariant_mode(device_type, tensor_parallel_parts)
    try:
        yield
    finally:
        parts.set_count(count)
        if not was_on:
            disable_batch_invariant_mode(device_type)


def _device_type(device_type: str | None) -> str:
    chosen = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen not in ("cuda", "cpu"):
        raise ValueError(f"device_type must be None, 'cuda' or 'cpu'; got {device_type!r}")
    return chosen


def _replace(device_type: str) -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    operators = {"topk": topk, **(_cpu_operators() if device_type == "cpu" else {"bmm": _bmm})}
    with warnings.catch_warnings():
        # PyTorch warns that operators are overridden, which is intended.
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name, operator in operators.items():
            library.impl(name, operator, device_type.upper())
    return library


def _bmm(left: Tensor, right: Tensor) -> Tensor:
    """PyTorch's, but one ``mm`` for an expanded matrix, which linear layers pass to ``bmm``."""
    if cpu.is_one_matrix(right):
        return left.flatten(0, 1).mm(right[0]).view(*left.shape[:2], right.shape[-1])
    return torch.bmm(left, right, out=left.new_empty(*left.shape[:2], right.shape[-1]))


def _cpu_operators() -> dict[str, Callable]:
    aten = torch.ops.aten

    def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
        return cpu.in_vectors(aten.gelu.out, x, approximate=approximate)

    def softplus(x: Tensor, beta=1, threshold=20) -> Tensor:
        return cpu.in_vectors(aten.softplus.out, x, beta, threshold)

    backward = partial(partial, cpu.in_vectors, result="grad_input")
    return {
        "mm": cpu.mm,
        "addmm": cpu.addmm,
        "bmm": cpu.bmm,
        "silu": partial(cpu.in_vectors, aten.silu.out),
        "sigmoid": partial(cpu.in_vectors, aten.sigmoid.out),
        "gelu": gelu,
        "softplus": softplus,
        # Gradients, since a rank's channels end elsewhere than the whole layer's.
        "silu_backward": backward(aten.silu_backward.grad_input),
        "gelu_backward": backward(aten.gelu_backward.grad_input),
        "softplus_backward": backward(aten.softplus_backward.grad_input),
    }
