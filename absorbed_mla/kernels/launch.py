"""Kernel launcher with little cost to the host."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# A pointer or an integer that is a multiple of it is compiled for.
_ALIGNMENT = 16
_INT32 = range(-(2**31), 2**31)


class _Prepared(NamedTuple):
    """What Triton compiled, and the values of its last parameters."""

    compiled: CompiledKernel
    constants: tuple


_prepared: dict[tuple, _Prepared] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """``kernel[grid](*args, **constants)``, which looks for what it compiled in a dearer way.

    Triton writes a text of all arguments and options at every launch, to find the kernel that was
    compiled for their like. Here a tuple of what the text depends on finds it. A kernel's first
    launch of a kind is Triton's own, and what Triton's settings ask of it (``TRITON_DEBUG``,
    ``triton.knobs``) is asked then. Later ones check no more that the globals that the kernel reads
    are what they were.

    Args:
        kernel: Of ``triton.jit`` or ``gluon.jit``. What stands for one, interpreted or emulated, is
            called as it is.
        grid: Programs along one to three axes.
        args: For the kernel's first parameters.
        constants: For those that follow, all ``constexpr``, and options such as ``num_warps``.
    """
    key = _key(kernel, args, constants) if isinstance(kernel, JITFunction) else None
    prepared = None if key is None else _prepared.get(key)
    if prepared is not None:
        prepared.compiled[(*grid, 1, 1)[:3]](*args, *prepared.constants)
        return
    compiled = kernel[grid](*args, **constants)
    # Something else than a compiled kernel is what a test puts in Triton's place, or a promise.
    if key is not None and isinstance(compiled, CompiledKernel):
        rest = _constants(kernel, len(args), constants)
        if rest is not None:
            _prepared[key] = _Prepared(compiled, rest)


def _key(kernel: JITFunction, args: Sequence[Any], constants: dict[str, Any]) -> tuple | None:
    """What the choice of a compiled kernel depends on, or None if that is not known."""
    key: list[Hashable] = [kernel, driver.active.get_current_device(), *constants.items()]
    # Indices of the constexpr parameters.
    key += [args[index] for index in kernel.constexprs if index < len(args)]
    append = key.append
    for arg in args:
        kind = type(arg)
        if kind is Tensor:
            append(arg.dtype)
            append(arg.data_ptr() % _ALIGNMENT == 0)
        elif kind is int:
            append(_kind_of_int(arg))
        elif kind is float or arg is None:
            append(kind)
        elif (box := getattr(arg, "box", None)) is not None:
            append(box)
        else:
            return None
    return tuple(key)


def _kind_of_int(number: int) -> int:
    """The same for numbers that one compiled kernel may serve."""
    if number == 1 or number not in _INT32:
        return number
    return 2 if number % _ALIGNMENT else 0


def _constants(kernel: JITFunction, first: int, given: dict[str, Any]) -> tuple | None:
    """The values of all parameters from ``first`` on, or None if they are not all constexpr."""
    rest = kernel.params[first:]
    if not all(parameter.is_constexpr and parameter.name in given for parameter in rest):
        return None
    return tuple(given[parameter.name] for parameter in rest)
