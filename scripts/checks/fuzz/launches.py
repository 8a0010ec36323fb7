"""Which kernels a case launches."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from unittest import mock

from triton.compiler import CompiledKernel
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

_PACKAGE = "absorbed_mla."


@contextlib.contextmanager
def recorded_launches() -> Iterator[Counter[str]]:
    """Counts launches by ``module.function`` below ``absorbed_mla``, in this process."""
    counts: Counter[str] = Counter()

    def name(function) -> str:
        return f"{function.__module__.removeprefix(_PACKAGE)}.{function.__name__}"

    run, interpret, again = JITFunction.run, InterpretedFunction.run, CompiledKernel.__getitem__

    def recorded_run(self, *args, **kwargs):
        counts[name(self.fn)] += 1
        return run(self, *args, **kwargs)

    def recorded_interpreted(self, *args, **kwargs):
        counts[name(self.fn)] += 1
        return interpret(self, *args, **kwargs)

    def recorded_again(self, grid):
        counts[name(self.src.fn.fn)] += 1
        return again(self, grid)

    with (
        mock.patch.object(JITFunction, "run", recorded_run),
        mock.patch.object(InterpretedFunction, "run", recorded_interpreted),
        mock.patch.object(CompiledKernel, "__getitem__", recorded_again),
    ):
        yield counts
