"""What decode.py has measured, and its rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from benchmarks.decode_cases import Case
from benchmarks.kit import provenance
from benchmarks.kit.plot import Panel, collected
from benchmarks.kit.report import Report, Times

_ITEMSIZE = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Ratio:
    """Times divided by the peer's of the same turns: the median, and the outer tenths' bounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, own: Sequence[float], peer: Sequence[float]) -> Ratio:
        """Of at least two turns, or of one without a spread."""
        ratios = [a / b for a, b in zip(own, peer, strict=True)]
        tenths = quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else ratios
        return cls(median(ratios), tenths[0], tenths[-1])


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case, or why there are no figures of it.

    Attributes:
        case: What was measured.
        times: Of one call; None if it was not measured.
        graph: Whether the call was a CUDA graph.
        difference: Relative difference of the output from the reference's in fp32.
        ratio: To FlashMLA; None for itself, or if it was not measured.
        error: Empty, or why figures are missing.
    """

    case: Case
    times: Times | None = None
    graph: bool = False
    difference: float | None = None
    ratio: Ratio | None = None
    error: str = ""


class DecodeReport(Report):
    """One run."""

    row = Row

    def figures(self, row: Row) -> dict[str, float]:
        """Microseconds, TFLOP/s, TB/s of latents read, difference, and the ratio to FlashMLA."""
        assert row.times is not None
        content, rope = self.environment["widths"]
        itemsize = _ITEMSIZE[self.environment["dtype"]]
        duration = row.times.median
        ratio = row.ratio
        beside = {"ratio": ratio.median, "low": ratio.low, "high": ratio.high} if ratio else {}
        return {
            "us": round(duration * 1e6, 2),
            "tflops": row.case.flops(content, rope) / duration / 1e12,
            "tbps": row.case.latent_bytes(content, rope, itemsize) / duration / 1e12,
            "graph": row.graph,
            "difference": row.difference,
            **beside,
        }

    @classmethod
    def notes(cls, reports: Sequence[DecodeReport]) -> list[str]:
        """The ceilings of each device."""
        return [provenance.ceilings_reached(report.environment) for report in reports]

    @classmethod
    def panels(cls, reports: Sequence[DecodeReport]) -> list[Panel]:
        """TFLOP/s, and TB/s of latents, with the ceilings, over the batch."""
        rates = []
        for rate, unit, ceiling in (
            ("tflops", "TFLOP/s", "matmul_tflops"),
            ("tbps", "TB/s", "copy_tbps"),
        ):
            points = (
                (
                    f"n={case.heads} kv={case.keys} s_q={case.query_length} "
                    f"block={case.block_size} [{unit}]",
                    case.implementation,
                    case.batch,
                    report.figures(row)[rate],
                )
                for report in reports
                for row in report.measured
                for case in (row.case,)
            )
            levels = {ceiling: reports[0].environment["ceilings"][ceiling]}
            rates.append(collected(points, "batch", levels=levels))
        # Both rates of the same requests beside each other.
        return [panel for pair in zip(*rates) for panel in pair]
