"""Switching the operators of this process to ones that are independent of the batch.

On a GPU they are Megatron's (``megatron.core.transformer.custom_layers.batch_invariant_kernels``)
and what it leaves out; on the CPU, for which it has none, this package's.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from megatron.core.transformer.custom_layers import batch_invariant_kernels as host
from torch import Tensor

from absorbed_mla.batch_invariant import collectives
from absorbed_mla.kernels.invariant import cpu
from absorbed_mla.kernels.invariant.topk import topk

# Device type -> what holds the operators that are replaced there.
_replaced: dict[str, torch.library.Library] = {}


def is_enabled(device: torch.device) -> bool:
    """Whether operators on a device like this one are independent of the batch."""
    if device.type == "cuda":
        # Perhaps by Megatron's own function; ``require_enabled`` adds what that leaves out.
        return host.is_batch_invariant_mode_enabled()
    return device.type in _replaced


def enable_batch_invariant_mode(device_type: str | None = None) -> None:
    """Make products, norms and activations of this process independent of the batch.

    Process-wide, until :func:`disable_batch_invariant_mode`: also for modules that are not this
    package's. Slower: see ``docs/parity.md``.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``; None: a GPU where there is one.

    Raises:
        ValueError: For another device.
    """
    device_type = _device_type(device_type)
    if device_type == "cuda":
        _enable_host()
    if device_type not in _replaced:
        _replaced[device_type] = _replace(device_type)
    collectives.sum_in_rank_order()


def disable_batch_invariant_mode(device_type: str | None = None) -> None:
    """Give the process its former operators back; see :func:`enable_batch_invariant_mode`."""
    device_type = _device_type(device_type)
    if device_type == "cuda":
        host.disable_batch_invariant_mode()
    if device_type in _replaced:
        _replaced.pop(device_type)._destroy()
    if not _replaced:
        collectives.sum_as_the_host_does()


@contextlib.contextmanager
def batch_invariant_mode(device_type: str | None = None) -> Iterator[None]:
    """:func:`enable_batch_invariant_mode` for a while, unless it was on before."""
    was_on = is_enabled(torch.device(_device_type(device_type)))
    enable_batch_invariant_mode(device_type)
    try:
        yield
    finally:
        if not was_on:
            disable_batch_invariant_mode(device_type)


def _device_type(device_type: str | None) -> str:
    found = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if found not in ("cuda", "cpu"):
        raise ValueError(f"device_type must be None, 'cuda' or 'cpu'; got {device_type!r}")
    return found


def _enable_host() -> None:
    try:
        host.enable_batch_invariant_mode()
    except ModuleNotFoundError as error:
        # It replaces PyTorch's operators first, then those of TransformerEngine (0.19.2), which
        # does not need to be there.
        if (error.name or "").split(".")[0] != "transformer_engine":
            raise


def _replace(device_type: str) -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    operators = {"topk": topk, **(_cpu_operators() if device_type == "cpu" else {"bmm": _bmm})}
    with warnings.catch_warnings():
        # PyTorch says that operators are overridden, which is what was asked for.
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name, operator in operators.items():
            library.impl(name, operator, device_type.upper())
    return library


def _bmm(left: Tensor, right: Tensor) -> Tensor:
    """PyTorch's, except for what linear layers make of inputs that are not contiguous."""
    if cpu.is_one_matrix(right):
        return torch.mm(left.reshape(-1, left.shape[-1]), right[0]).view(
            *left.shape[:2], right.shape[-1]
        )
    return torch.bmm(left, right, out=left.new_empty(*left.shape[:2], right.shape[-1]))


def _cpu_operators() -> dict[str, Callable]:
    aten = torch.ops.aten

    def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
        return cpu.in_vectors(aten.gelu.out, x, approximate=approximate)

    def softplus(x: Tensor, beta=1, threshold=20) -> Tensor:
        return cpu.in_vectors(aten.softplus.out, x, beta, threshold)

    return {
        "mm": cpu.mm,
        "addmm": cpu.addmm,
        "bmm": cpu.bmm,
        "silu": partial(cpu.in_vectors, aten.silu.out),
        "sigmoid": partial(cpu.in_vectors, aten.sigmoid.out),
        "gelu": gelu,
        "softplus": softplus,
    }
