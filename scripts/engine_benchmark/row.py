"""What was measured of one case."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from engine_benchmark.arguments import Case
from engine_benchmark.comparison import Comparison


@dataclass
class Row:
    """All requests in one engine.

    Attributes:
        case: What ran.
        error: What it raised, or what was wrong with what it did; ``""`` if all is well.
        seconds: From the first request to the end of the last.
        generated: Tokens.
        engine: Counters of the engine's steps.
        missing: Of what the workload should make the engine do, what did not happen.
        capture_seconds: To make the engine, CUDA graphs included.
        peak_bytes: Of device memory, or None.
        comparison: With the tokens that every request has alone, or None.
    """

    case: Case
    error: str = ""
    seconds: float | None = None
    generated: int = 0
    engine: dict[str, int] = dataclasses.field(default_factory=dict)
    missing: tuple[str, ...] = ()
    capture_seconds: float | None = None
    peak_bytes: int | None = None
    comparison: Comparison | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Generated, over all requests."""
        return self.generated / self.seconds if self.seconds else None

    @property
    def ok(self) -> bool:
        """Whether it ran, was put to the test, and every token is right."""
        different = self.comparison.different if self.comparison else 0
        return not (self.error or self.missing or different)

    def as_json(self) -> dict:
        """For the report."""
        return {
            **dataclasses.asdict(self),
            "tokens_per_second": self.tokens_per_second,
            "ok": self.ok,
        }

    def __str__(self) -> str:
        if self.error:
            return f"{self.case!s:22s} {self.error.splitlines()[0][:150]}"
        parts = [f"{self.case!s:22s} {self.tokens_per_second:9.0f} tokens/s"]
        parts += [f"{name.replace('_', ' ')} {value}" for name, value in self.engine.items()]
        if self.comparison:
            parts.append(
                f"alone the same {self.comparison.equal}, ties {self.comparison.ties}, "
                f"different {self.comparison.different}"
            )
        if self.missing:
            parts.append(f"did not happen: {', '.join(self.missing)}")
        return "; ".join(parts)
