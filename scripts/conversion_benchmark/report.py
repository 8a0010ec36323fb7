"""Measurements as JSON, a Markdown table and a plot, and whether they keep the bounds."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from benchmark_report import figure, markdown_table

MEMORY_FACTOR, MEMORY_BASE = 2.5, 600 * 10**6
THROUGHPUT = 0.6
# Below, the start of Python and torch takes a good part of the time.
THROUGHPUT_FROM = 4 * 10**9

EXPLANATION = f"""\
- **time**: from the start of the process until the file system has written everything
  (`sync -f`), for `cp -r` and for the tool alike. Both begin with nothing of the source in the page
  cache; they run in turn, on the same disk.
- **of cp**: mean time of `cp -r` of the source's folder, divided by the tool's mean time; at least
  {THROUGHPUT} where dtypes are kept, from {THROUGHPUT_FROM // 10**9} GB on (below, the start
  of Python counts for too much). FP8 has no bound: its target has nearly twice the source's bytes.
- **peak memory**: resident, of all processes of the tool, mapped pages of files included; at most
  {MEMORY_FACTOR} x the largest tensor of the Hugging Face checkpoint (dequantised) +
  {MEMORY_BASE // 10**6} MB. **own**: without the mapped pages, which the kernel can take back.
- GB and MB are decimal."""


@dataclass(frozen=True)
class Row:
    """One conversion at one size.

    Attributes:
        path: What was converted to what.
        model: The checkpoint in words.
        source_bytes: Of all files of the source.
        target_bytes: Of all files of the target.
        largest_tensor: Bytes of the largest tensor.
        keeps_dtypes: Whether source and target have the same bytes.
        cp_seconds: Every measured copy of the source.
        tool_seconds: Every measured conversion, each after its copy.
        peak_bytes: Most resident memory of any of the conversions.
        anonymous_bytes: The most of it that was not mapped files.
    """

    path: str
    model: str
    source_bytes: int
    target_bytes: int
    largest_tensor: int
    keeps_dtypes: bool
    cp_seconds: Sequence[float]
    tool_seconds: Sequence[float]
    peak_bytes: int
    anonymous_bytes: int

    @property
    def ratio(self) -> float:
        """Throughput relative to copying."""
        return mean(self.cp_seconds) / mean(self.tool_seconds)

    @property
    def memory_bound(self) -> float:
        """Bytes that may be resident."""
        return MEMORY_FACTOR * self.largest_tensor + MEMORY_BASE

    def missed(self) -> list[str]:
        """The bounds that do not hold, in words."""
        problems = []
        what = f"{self.path} at {self.source_bytes / 1e9:.2f} GB"
        if self.peak_bytes > self.memory_bound:
            got, bound = self.peak_bytes / 1e6, self.memory_bound / 1e6
            problems.append(f"{what}: {got:.0f} MB resident, at most {bound:.0f} MB")
        if self.judged_by_throughput and self.ratio < THROUGHPUT:
            problems.append(f"{what}: {self.ratio:.2f} of cp's throughput, at least {THROUGHPUT}")
        return problems

    @property
    def judged_by_throughput(self) -> bool:
        """Whether the bound on throughput is for this row."""
        return self.keeps_dtypes and self.source_bytes >= THROUGHPUT_FROM

    def as_json(self) -> dict:
        """Everything measured and what follows from it."""
        derived = {"ratio": self.ratio, "memory_bound": self.memory_bound, "missed": self.missed()}
        return asdict(self) | derived


def write_report(folder: Path, rows: Sequence[Row], machine: dict) -> None:
    """Write benchmark.json, benchmark.md and benchmark.png."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine, "rows": [row.as_json() for row in rows]}
    (folder / "benchmark.json").write_text(json.dumps(content, indent=2) + "\n")
    (folder / "benchmark.md").write_text(markdown(rows, machine))
    plot(rows, folder / "benchmark.png")


def markdown(rows: Sequence[Row], machine: dict) -> str:
    """The whole report."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    measured = (
        f"Measured on {machine['date']} by `{machine['command']}` at {machine['commit']}: "
        f"{machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 1e9:.0f} GB memory, {machine['filesystem']}, "
        f"{machine['system']}; {versions}."
    )
    models = "\n".join(f"- {model}" for model in dict.fromkeys(row.model for row in rows))
    problems = [problem for row in rows for problem in row.missed()]
    verdict = "\n".join(f"- missed: {p}" for p in problems) or "Every bound that applies holds."
    parts = ["# Memory and throughput of conversions", measured, models, table(rows), verdict]
    parts += [growth(rows), "![Memory and throughput](benchmark.png)", EXPLANATION]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(rows: Sequence[Row]) -> str:
    """One line per conversion."""
    head = ["conversion", "source", "target", "cp", "tool", "tool's rate", "of cp"]
    head += ["peak memory", "own", "bound"]
    lines = []
    for row in rows:
        seconds = mean(row.tool_seconds)
        ratio = f"{row.ratio:.2f}" + ("" if row.judged_by_throughput else " (no bound)")
        lines.append(
            [
                row.path,
                f"{row.source_bytes / 1e9:.2f} GB",
                f"{row.target_bytes / 1e9:.2f} GB",
                f"{mean(row.cp_seconds):.1f} s",
                f"{seconds:.1f} s",
                f"{row.source_bytes / seconds / 1e6:.0f} MB/s",
                ratio,
                f"{row.peak_bytes / 1e6:.0f} MB",
                f"{row.anonymous_bytes / 1e6:.0f} MB",
                f"{row.memory_bound / 1e6:.0f} MB",
            ]
        )
    return markdown_table(head, lines, ["conversion"])


def growth(rows: Sequence[Row]) -> str:
    """How memory and time grow from the smallest size to the largest; empty for one size."""
    lines = []
    for path, group in _by_path(rows).items():
        first, last = group[0], group[-1]
        if first is last:
            continue
        size = last.source_bytes / first.source_bytes
        memory = last.peak_bytes / first.peak_bytes
        seconds = mean(last.tool_seconds) / mean(first.tool_seconds)
        lines.append(f"- {path}: {size:.1f} x the size, {memory:.2f} x the peak memory, ")
        lines[-1] += f"{seconds:.1f} x the time"
    return "\n".join(["Growth from the smallest size to the largest:", "", *lines]) if lines else ""


def _by_path(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.source_bytes):
        groups[row.path].append(row)
    return groups


def plot(rows: Sequence[Row], path: Path) -> None:
    """Peak memory beside its bound, and throughput beside that of cp, over the size."""
    with figure(path, 1, 2, (11, 4.2)) as [(memory, throughput)]:
        for name, group in _by_path(rows).items():
            sizes = [row.source_bytes / 1e9 for row in group]
            memory.plot(sizes, [row.peak_bytes / 1e9 for row in group], "o-", label=name)
            throughput.plot(sizes, [row.ratio for row in group], "o-", label=name)
        bounds = sorted((row.source_bytes / 1e9, row.memory_bound / 1e9) for row in rows)
        memory.plot(*zip(*bounds), "k--", label="bound")
        memory.set_ylabel("peak resident memory [GB]")
        label = "bound where dtypes are kept"
        throughput.axhline(THROUGHPUT, color="k", linestyle="--", label=label)
        throughput.set_ylabel("throughput relative to cp -r")
        for axes in (memory, throughput):
            axes.set_xlabel("source [GB]")
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7)
