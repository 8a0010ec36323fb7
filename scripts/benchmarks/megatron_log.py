"""Reading the log of Megatron's training loop, as pretrain_gpt.py runs it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_NUMBER = r"([-+0-9.eE]+|nan|inf)"
_ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ \|")
_VALUES = {
    "seconds": re.compile(rf"elapsed time per iteration \(ms\): {_NUMBER}"),
    "tflops": re.compile(rf"throughput per GPU \(TFLOP/s/GPU\): {_NUMBER}"),
    "loss": re.compile(rf"lm loss: {_NUMBER}"),
    "grad_norm": re.compile(rf"grad norm: {_NUMBER}"),
}
_PEAK = re.compile(rf"max allocated: {_NUMBER}")
_PARAMETERS = re.compile(r"model parallel rank \(.*\): (\d+)")
# Printed by pretrain_gpt.py.
CHOSEN = "Core attention of ours ran:"
_CHOSEN = re.compile(rf"^{re.escape(CHOSEN)} (.+)$", re.MULTILINE)
# The line of Python that says what went wrong, with torchrun's prefix or without.
_ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception)\b.*)", re.MULTILINE)


@dataclass(frozen=True)
class Iteration:
    """One line of the log."""

    iteration: int  # from 1
    loss: float  # per token, nats
    seconds: float  # of the iteration
    tflops: float  # of one GPU, by Megatron's count of operations
    grad_norm: float | None = None  # None where gradients are not clipped


def iterations(text: str) -> Iterator[Iteration]:
    """All lines of ``text`` that are of an iteration.

    After the first iteration Megatron prints a time without resetting it: the second's holds both.
    """
    for line in text.splitlines():
        head = _ITERATION.search(line)
        found = {name: pattern.search(line) for name, pattern in _VALUES.items()}
        if not head or found["loss"] is None or found["seconds"] is None:
            continue
        values = {name: float(match[1]) for name, match in found.items() if match}
        values["seconds"] /= 1e3
        yield Iteration(int(head[1]), **{"tflops": 0.0, **values})


def facts(text: str) -> dict[str, int | str | None]:
    """Of the whole run, where the log has them.

    Returns:
        ``parameters`` of the model, ``peak_bytes``, the most memory allocated on the GPU, and
        ``ran``, form and backend of our attentions; empty for another's.
    """
    parameters, peaks, ran = _PARAMETERS.search(text), _PEAK.findall(text), _CHOSEN.search(text)
    return {
        "parameters": int(parameters[1]) if parameters else None,
        "peak_bytes": int(float(peaks[-1]) * 2**20) if peaks else None,
        "ran": ran[1] if ran else "",
    }


def problem(text: str) -> str:
    """The first error's message, or the last line."""
    found = _ERROR.search(text)
    lines = [line for line in text.splitlines() if line.strip()]
    return found[1] if found else lines[-1] if lines else "no output"
