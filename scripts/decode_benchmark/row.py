"""What was measured of one case."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from attention_benchmark.row import Refused, Times
from context_parallel_benchmark.row import shortened
from decode_benchmark.cases import DecodeCase


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case, or why there are no figures of it.

    Attributes:
        case: What was measured.
        times: Of one call; None if it was not measured.
        graph: Whether the call was a CUDA graph.
        difference: Of the output to the reference's, relative, or None.
        error: Empty, or why figures are missing.
    """

    case: DecodeCase
    times: Times | None = None
    graph: bool = False
    difference: float | None = None
    error: str = ""

    def as_json(self) -> dict:
        """All fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict) -> Row:
        """The inverse of :meth:`as_json`."""
        times = content["times"]
        fields = {
            "case": DecodeCase(**content["case"]),
            "times": None if times is None else Times(**times),
        }
        return cls(**{**content, **fields})


def failed(case: DecodeCase, error: BaseException) -> Row:
    """The row of a case that could not be measured.

    The error is kept as text: a traceback would keep the tensors alive that memory is short of.
    """
    text = str(error)
    if not isinstance(error, Refused):
        text = f"{type(error).__name__}: {text}"
    return Row(case=case, error=shortened(text, 1000))
