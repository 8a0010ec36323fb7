"""Tables and plot of what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from benchmark_report import StoredReport, can_plot, figure, markdown_table
from cached_benchmark.cases import flops, offloaded_bytes
from cached_benchmark.measure import Found
from context_parallel_benchmark.report import tokens_text

NAME = "cached"
PREFILL_TARGET = 0.85
HEADS = {
    "prefill": ["heads", "new tokens", "context", "ms", "attention TFLOP/s", "with expansion",
                "bare attention TFLOP/s", "ratio", "peak MiB"],
    "offload": ["heads", "batch", "context", "resident", "ms", "all resident ms", "more ms",
                "bytes / link ms", "peak MiB"],
}  # fmt: skip


@dataclass
class Report(StoredReport):
    """One run.

    Attributes:
        environment: Machine, versions, command, ``link`` in bytes per second.
        rows: What was measured.
    """

    environment: dict
    rows: list[Found]
    entry: ClassVar[type] = Found

    def figures(self, found: Found) -> dict[str, float]:
        """What the issue's targets are about, by name; empty where nothing was measured."""
        if found.ours is None or found.beside is None:
            return {}
        dims, seconds = self.environment["dims"], found.ours.median
        if found.case.suite == "prefill":
            count = flops(found.case, dims)
            bare = count["attention"] / found.beside.median / 1e12
            whole = sum(count.values()) / seconds / 1e12
            rate = count["attention"] / seconds / 1e12
            return {"attention": rate, "whole": whole, "bare": bare, "ratio": whole / bare}
        moved = offloaded_bytes(found.case, dims, self.environment["itemsize"])
        more = seconds - found.beside.median
        return {"more_ms": 1e3 * more, "link_ms": 1e3 * moved / self.environment["link"]}


def _cells(report: Report, found: Found) -> list[str]:
    case, figures = found.case, report.figures(found)
    peak = "" if found.peak_bytes is None else f"{found.peak_bytes / 2**20:.0f}"
    assert found.ours is not None and found.beside is not None
    ms = f"{1e3 * found.ours.median:.3g}"
    if case.suite == "prefill":
        rates = [f"{figures[name]:.3g}" for name in ("attention", "whole", "bare", "ratio")]
        return [str(case.heads), str(case.queries), str(case.context), ms, *rates, peak]
    beside = f"{1e3 * found.beside.median:.3g}"
    costs = [f"{figures[name]:.3g}" for name in ("more_ms", "link_ms")]
    sizes = (case.heads, case.batch, case.context, case.resident)
    return [*map(str, sizes), ms, beside, *costs, peak]


def tables(reports: Sequence[Report]) -> Iterator[str]:
    """One table for each suite that was measured."""
    for suite, head in HEADS.items():
        lines = [
            _cells(report, found)
            for report in reports
            for found in report.rows
            if found.case.suite == suite and report.figures(found)
        ]
        if lines:
            yield f"**{suite}**\n\n{markdown_table(head, lines, ())}"


def errors(reports: Sequence[Report]) -> str:
    """The cases without figures, and why."""
    failed = [f"- {f.case}: {f.error}" for report in reports for f in report.rows if f.error]
    return "\n".join(["Not measured:", *failed]) if failed else ""


def markdown(reports: Sequence[Report]) -> str:
    """The whole report."""
    text = ["# Attention over cached latents"]
    for report in reports:
        facts = report.environment
        text.append(
            f"{facts['device']}, {facts['dtype']}, {facts['date']}, commit {facts['commit']}, "
            f"link {facts['link'] / 1e9:.3g} GB/s\n\n`{facts['command']}`"
        )
    text += [
        "prefill: many new tokens over a cached context, beside the bare attention of the expanded "
        f"form; the ratio is of the rates, expansion counted as work (target {PREFILL_TARGET}). "
        "offload: one decoded token of each request with part of the context in host memory, "
        "beside all of it on the device, and what the link needs for the bytes.",
        *tables(reports),
        errors(reports),
    ]
    return "\n\n".join(filter(None, text)) + "\n"


def summary(reports: Sequence[Report]) -> str:
    """One line of JSON."""
    return json.dumps(
        {
            str(found.case): report.figures(found) or {"error": found.error}
            for report in reports
            for found in report.rows
        }
    )


def plot(reports: Sequence[Report], path: Path) -> bool:
    """Rates beside the bare attention's, and what offloading costs beside the link's time."""
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for report in reports:
        for found in report.rows:
            figures, case = report.figures(found), found.case
            if not figures:
                continue
            prefill = case.suite == "prefill"
            what = f"{case.queries} new" if prefill else f"batch {case.batch}"
            value = figures["ratio"] if prefill else figures["more_ms"] / figures["link_ms"]
            key = (case.suite, f"{case.heads} heads, {what}")
            lines.setdefault(key, []).append((case.context, value))
    suites = sorted({suite for suite, _ in lines}, reverse=True)
    if not suites or not can_plot():
        return False
    titles = {
        "prefill": ("TFLOP/s of the bare attention", PREFILL_TARGET),
        "offload": ("added time of what the link needs for the bytes", 1.0),
    }
    with figure(path, 1, len(suites), (6.5 * len(suites), 4.5)) as grid:
        for axes, suite in zip(grid.flat, suites):
            contexts = set()
            for (of, label), points in lines.items():
                if of == suite:
                    axes.plot(*zip(*sorted(points)), marker="o", label=label)
                    contexts |= {context for context, _ in points}
            title, target = titles[suite]
            axes.axhline(target, color="black", linestyle=":", label=f"target {target}")
            contexts = sorted(
                {x for (of, _), line in lines.items() if of == suite for x, _ in line}
            )
            axes.set(title=f"{suite}: {title}", xlabel="context", xscale="log", ylim=(0, None))
            axes.set_xticks(sorted(contexts), [tokens_text(x) for x in sorted(contexts)])
            axes.minorticks_off()
            axes.legend(fontsize=7)
    return True
