"""What was measured of one case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from attention_benchmark.cases import CoreCase, LayerCase
from context_parallel_benchmark.row import shortened

_CASES = {"layer": LayerCase, "core": CoreCase}


@dataclass(frozen=True)
class Times:
    """Seconds of the repetitions: the middle one's, the shortest, the longest, and their number."""

    median: float
    least: float
    most: float
    repetitions: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        """Of at least one repetition."""
        return cls(median(seconds), min(seconds), max(seconds), len(seconds))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case, or why there are no figures of it.

    Attributes:
        case: What was measured.
        forward: None if it was not measured.
        backward: Of a layer or an attention; None if it was not measured.
        step: Forward and backward; None if it was not measured.
        kept_bytes: Allocated by forward until backward; None without a GPU.
        peak_bytes: The most allocated during a step beyond weights, input and output gradient;
            None without a GPU.
        ran: Form and backend that a layer of ours chose.
        error: Empty, or why figures are missing.
    """

    case: LayerCase | CoreCase
    forward: Times | None = None
    backward: Times | None = None
    step: Times | None = None
    kept_bytes: int | None = None
    peak_bytes: int | None = None
    ran: str = ""
    error: str = ""

    @property
    def suite(self) -> str:
        """``"layer"`` or ``"core"``."""
        return "layer" if isinstance(self.case, LayerCase) else "core"

    def as_json(self) -> dict:
        """All fields."""
        return {"suite": self.suite, **asdict(self)}

    @classmethod
    def from_json(cls, content: dict) -> Row:
        """The inverse of :meth:`as_json`."""
        fields = {name: value for name, value in content.items() if name != "suite"}
        fields["case"] = _CASES[content["suite"]](**content["case"])
        for name in ("forward", "backward", "step"):
            if fields[name] is not None:
                fields[name] = Times(**fields[name])
        return cls(**fields)


def failed(case: LayerCase | CoreCase, error: BaseException) -> Row:
    """The row of a case that could not be measured.

    The error is kept as text: a traceback would keep the tensors alive that memory is short of.
    """
    text = str(error)
    if not isinstance(error, Refused):
        text = f"{type(error).__name__}: {text}"
    return Row(case=case, error=shortened(text, 1000))


class Refused(Exception):
    """A case that the implementation does not do, with its reason."""
