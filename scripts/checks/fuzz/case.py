"""One case: a configuration's number and, within it, a case's."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import torch
from triton.compiler import CompiledKernel
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from checks.fuzz.compare import Comparison
from checks.fuzz.draw import Draw
from checks.fuzz.family import Config, Family


class CaseId(NamedTuple):
    """What a case follows from, as ``--case`` takes it: ``SEED.CONFIGURATION.NUMBER``."""

    seed: int
    configuration: int
    number: int

    @classmethod
    def parse(cls, text: str) -> CaseId:
        """From the text that ``str`` makes.

        Raises:
            ValueError: If it is not three numbers.
        """
        try:
            seed, configuration, number = map(int, text.split("."))
        except ValueError:
            message = f"--case must be SEED.CONFIGURATION.NUMBER, such as 0.3.7; got {text!r}"
            raise ValueError(message) from None
        return cls(seed, configuration, number)

    def __str__(self) -> str:
        return ".".join(map(str, self))


class Outcome(NamedTuple):
    """Of a case."""

    error: str | None  # what is wrong; None: nothing
    configuration: str  # as text
    worst: float  # largest share of a tolerance that was used
    launched: tuple[str, ...]  # kernels
    seconds: float  # with compilation
    fatal: bool = False  # whether the process can run no more cases


def run_case(
    family: Family,
    case: CaseId,
    device: torch.device,
    comparison: Callable[[], Comparison] = Comparison,
    *,
    with_traceback: bool = False,
) -> Outcome:
    """Draw and run a case; what is raised is its error."""
    compare, start = comparison(), time.monotonic()
    error, fatal, launched = None, False, ()
    seed = family.name, case.seed, case.configuration
    config = Config(device, *seed)
    try:
        with recorded_launches() as counts:
            family.run(config, Draw(device, *seed, case.number), compare)
            if device.type == "cuda":
                torch.cuda.synchronize()
        launched = tuple(sorted(counts))
        if not compare.compared:
            error = "nothing was compared"
    except Exception as caught:  # what it is, is what is looked for
        error = f"{type(caught).__name__}: {caught}"
        if with_traceback:
            error = "".join(traceback.format_exception(caught))
        fatal = device.type == "cuda" and _is_broken()
    seconds = time.monotonic() - start
    return Outcome(error, str(config), compare.worst, launched, seconds, fatal)


def _is_broken() -> bool:
    """Whether the device takes no more work of this process, as after an illegal access."""
    try:
        torch.cuda.synchronize()
        torch.ones(1, device="cuda").item()
    except RuntimeError:
        return True
    return False


@contextlib.contextmanager
def recorded_launches() -> Iterator[Counter[str]]:
    """Counts launches by ``module.function`` below ``absorbed_mla``, in this process."""
    counts: Counter[str] = Counter()

    def recording(method: Callable, function_of: Callable) -> Callable:
        def recorded(self, *args, **kwargs):
            function = function_of(self)
            counts[f"{function.__module__.removeprefix('absorbed_mla.')}.{function.__name__}"] += 1
            return method(self, *args, **kwargs)

        return recorded

    with contextlib.ExitStack() as stack:
        for cls, name, function_of in (
            (JITFunction, "run", lambda kernel: kernel.fn),
            (InterpretedFunction, "run", lambda kernel: kernel.fn),
            # Of a kernel that the package has compiled once and launches again.
            (CompiledKernel, "__getitem__", lambda kernel: kernel.src.fn.fn),
        ):
            method = recording(getattr(cls, name), function_of)
            stack.enter_context(mock.patch.object(cls, name, method))
        yield counts
