"""Rates of what was measured: a table, and one line of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from benchmark_report import StoredReport
from decode_benchmark.row import Row

_HEAD = ("n", "batch", "kv", "s_q", "block", "implementation", "us", "TFLOP/s", "TB/s", "diff", "")
_ITEMSIZE = {"bfloat16": 2, "float32": 4}


@dataclass
class Report(StoredReport):
    """One run.

    Attributes:
        environment: From the machine.
        rows: In the order of measuring.
    """

    entry: ClassVar = Row
    environment: dict
    rows: list[Row]

    def rates(self, row: Row) -> tuple[float, float]:
        """TFLOP/s, and TB/s of latents read."""
        content, rope = self.environment["widths"]
        size = _ITEMSIZE[self.environment["dtype"]]
        assert row.times is not None
        flops, read = row.case.flops(content, rope), row.case.latent_bytes(content, rope, size)
        return flops / row.times.median / 1e12, read / row.times.median / 1e12

    @property
    def measured(self) -> list[Row]:
        """Rows with a time."""
        return [row for row in self.rows if row.times is not None]


def brief(report: Report, row: Row) -> str:
    """One line."""
    if row.times is None:
        return f"{row.case}: {row.error}"
    tflops, tbps = report.rates(row)
    return f"{row.case}: {row.times.median * 1e6:.1f} us, {tflops:.3g} TFLOP/s, {tbps:.3g} TB/s"


def print_table(report: Report) -> None:
    """What was measured, and why the rest was not, to stderr."""
    lines = [_HEAD, *_lines(report)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    ceilings = report.environment["ceilings"]
    print(
        f"{report.environment['device']}: product {ceilings['matmul_tflops']:.3g} TFLOP/s, "
        f"copy {ceilings['copy_tbps']:.3g} TB/s",
        file=sys.stderr,
    )
    for line in lines:
        text = "  ".join(word.rjust(width) for word, width in zip(line, widths))
        print(text.rstrip(), file=sys.stderr)
    # The same reason for many inputs is said once.
    reasons = {f"{row.case.implementation}: {row.error}": None for row in report.rows if row.error}
    for reason in reasons:
        print(f"not measured: {reason}", file=sys.stderr)


def _lines(report: Report) -> Iterator[tuple[str, ...]]:
    for row in report.measured:
        assert row.times is not None
        tflops, tbps = report.rates(row)
        case = row.case
        yield (
            *(str(number) for number in case.input),
            case.implementation,
            f"{row.times.median * 1e6:.1f}",
            f"{tflops:.3g}",
            f"{tbps:.3g}",
            f"{row.difference:.1e}",
            "graph" if row.graph else "",
        )


def summary(report: Report) -> str:
    """One line of JSON: the environment, every rate, and why others are missing."""
    rows = []
    for row in report.rows:
        content = row.case.as_json()
        if row.times is None:
            content["error"] = row.error
        else:
            tflops, tbps = report.rates(row)
            content["us"] = round(row.times.median * 1e6, 2)
            content |= {"tflops": round(tflops, 4), "tbps": round(tbps, 4), "graph": row.graph}
            content["difference"] = row.difference
        rows.append(content)
    return json.dumps({"environment": report.environment, "rows": rows})
