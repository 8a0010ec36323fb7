"""What was measured of one case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median

from context_parallel_benchmark.arguments import Case


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case, or why there are no figures of it.

    Times and bytes are the largest over the ranks; those of a repetition over the same repetition.

    Attributes:
        case: What was measured.
        cp_size: Ranks.
        forward_seconds: Every timed forward.
        step_seconds: Every timed forward and backward.
        kept_bytes: Allocated by forward until backward; None without a GPU.
        peak_bytes: The most allocated during a step beyond weights, input and output gradient;
            None without a GPU.
        forward_sent_bytes: By a rank.
        backward_sent_bytes: By a rank.
        traffic: Of "forward" and "backward", rank 0's calls by operation, group size and dtype.
        forward_overlap: Least fraction of a rank's communication kernels' time in forward that
            other kernels cover; None if not measured.
        backward_overlap: The same of backward.
        ran: Form and backend that a layer of ours took; empty if that was not recorded.
        error: Empty, or why the figures are missing.
    """

    case: Case
    cp_size: int
    forward_seconds: Sequence[float] = ()
    step_seconds: Sequence[float] = ()
    kept_bytes: int | None = None
    peak_bytes: int | None = None
    forward_sent_bytes: int = 0
    backward_sent_bytes: int = 0
    traffic: dict[str, list[dict]] | None = None
    forward_overlap: float | None = None
    backward_overlap: float | None = None
    ran: str = ""
    error: str = ""

    @property
    def forward_bytes_per_token(self) -> float:
        """Sent in forward, of each of a rank's tokens, for each other rank."""
        return self._per_token(self.forward_sent_bytes)

    @property
    def backward_bytes_per_token(self) -> float:
        """Sent in backward, of each of a rank's tokens, for each other rank."""
        return self._per_token(self.backward_sent_bytes)

    def _per_token(self, num_bytes: int) -> float:
        return num_bytes / (self.case.tokens // self.cp_size * (self.cp_size - 1))

    def as_json(self) -> dict:
        """Everything measured and what follows from it."""
        content = asdict(self)
        if not self.error:
            content["forward_ms"] = _summary(self.forward_seconds)
            content["step_ms"] = _summary(self.step_seconds)
            content["forward_bytes_per_token"] = self.forward_bytes_per_token
            content["backward_bytes_per_token"] = self.backward_bytes_per_token
        return content

    def brief(self) -> dict:
        """The most important figures, for the last line of the output."""
        content = {**asdict(self.case), "cp_size": self.cp_size}
        if self.error:
            return {**content, "error": shortened(self.error)}
        return {
            **content,
            "ran": self.ran,
            "forward_ms": round(1e3 * median(self.forward_seconds), 3),
            "step_ms": round(1e3 * median(self.step_seconds), 3),
            "kept_bytes": self.kept_bytes,
            "peak_bytes": self.peak_bytes,
            "forward_bytes_per_token": self.forward_bytes_per_token,
            "backward_bytes_per_token": self.backward_bytes_per_token,
            "forward_overlap": self.forward_overlap,
            "backward_overlap": self.backward_overlap,
        }

    @classmethod
    def from_json(cls, content: dict) -> Row:
        """The inverse of :meth:`as_json`."""
        names = (field.name for field in fields(cls))
        # "ran" is not in older files.
        own = {name: content[name] for name in names if name != "ran" or name in content}
        return cls(**{**own, "case": Case(**content["case"])})


def shortened(error: str, most: int = 300) -> str:
    """The beginning of an error on one line."""
    line = " ".join(error.split())
    return line if len(line) <= most else line[: most - 3] + "..."


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    values = {"median": median(seconds), "min": min(seconds), "max": max(seconds)}
    return {name: 1e3 * value for name, value in values.items()}
