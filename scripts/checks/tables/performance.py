"""The tables of docs/measurements/performance.md."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kit.tables import markdown_table
from checks.tables.comparisons import Measured, Row, measured

HEAD = ("work", "ours", "peer", "peer's", "ratio", "spread", "other runs", "run")
_WORDS = ("work", "peer", "spread", "other runs")
_NOT_INSTALLED = "not installed"
# Names in the files that are not the projects' own.
_NAMES = {
    "python": "Python",
    "torch": "PyTorch",
    "megatron-core": "Megatron-Core",
    "transformer-engine-torch": "TransformerEngine (TE)",
    "triton": "Triton",
    "cuda": "CUDA",
    "cudnn": "cuDNN (whose was not recorded)",
    "cudnn of torch": "cuDNN of PyTorch",
    "cudnn of transformer-engine": "cuDNN of TransformerEngine",
    "nccl": "NCCL",
    "vllm": "vLLM",
    "flash-mla": "FlashMLA",
}


def comparison_table(docs: Path) -> str:
    """Ours beside peers, group by group."""
    sections = measured(docs)
    numbers = {file: number for number, file in enumerate(_files(sections), 1)}
    lines = []
    for one in sections:
        lines.append([f"**{one.section.title}**", *[""] * (len(HEAD) - 1)])
        for row in one.shown:
            run = f"[{numbers[row.file]}]({row.file})"
            lines.append([*_cells(row), _repeats_text(one.repeats(row)), run])
    return markdown_table(HEAD, lines, _WORDS)


def summary(docs: Path) -> str:
    """In how many comparisons ours is slower."""
    sections = measured(docs)
    shown = _count_text([row for one in sections for row in one.shown])
    every = _count_text([row for one in sections for row in one.typical])
    return f"Ours is slower in {shown} rows of the table, and in {every} comparisons in its files."


def _count_text(rows: Sequence[Row]) -> str:
    return f"{sum(row.slower for row in rows)} of the {len(rows)}"


def _cells(row: Row) -> list[str]:
    ratio = f"**{row.ratio:.2f}**" if row.slower else f"{row.ratio:.2f}"
    medians = row.ours.median, row.theirs.median
    ours, theirs = (time_text(one, min(medians)) for one in medians)
    spread = "-" if row.spread is None else "{:.2f} to {:.2f}".format(*row.spread)
    return [row.work, ours, row.peer, theirs, ratio, spread]


def time_text(seconds: float, scale: float) -> str:
    """Three digits or more, in ms; in µs if ``scale`` is less than a millisecond."""
    value, unit = (1e3 * seconds, "ms") if scale >= 1e-3 else (1e6 * seconds, "µs")
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def _repeats_text(ratios: Sequence[float]) -> str:
    texts = [f"{ratio:.2f}" for ratio in sorted(ratios)]
    return ", ".join(texts) if len(texts) < 3 else f"{texts[0]} to {texts[-1]} ({len(texts)})"


def _files(sections: Sequence[Measured]) -> list[str]:
    """All files that rows come from, also repeated ones, in the order of the page."""
    return list(dict.fromkeys(row.file for one in sections for row in one.every))


def _environments(docs: Path) -> dict[str, dict]:
    return {
        file: json.loads((docs / file).read_text())["environment"]
        for file in _files(measured(docs))
    }


def runs_list(docs: Path) -> str:
    """One item per file: date, commit and command."""
    lines = []
    for number, (file, about) in enumerate(_environments(docs).items(), 1):
        source = f"[{file}]({file}), {about['date']}, commit {about['commit']}"
        lines.append(f"{number}. {source}: `{present_command(about['command'])}`")
    return "\n".join(lines)


def present_command(command: str) -> str:
    """A recorded command with the present paths of a script and data that were moved since."""
    command = re.sub(r"scripts/bench_(\w+\.py)", r"scripts/benchmarks/\1", command)
    return re.sub(r" docs/(?!measurements/)", " docs/measurements/", command)


def machine_list(docs: Path) -> str:
    """GPUs, dates and versions; what not all runs have, with their numbers."""
    found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    environments = _environments(docs).values()
    for number, about in enumerate(environments, 1):
        versions = {_NAMES.get(name, name): value for name, value in about["versions"].items()}
        for name, value in {"GPU": about["device"], "date": about["date"], **versions}.items():
            if value != _NOT_INSTALLED:
                found[name][value].append(number)
    return "\n".join(
        f"- {name}: {_values_text(values, len(environments))}" for name, values in found.items()
    )


def _values_text(values: dict[str, list[int]], runs: int) -> str:
    """Values with the numbers of their runs, unless one is that of all."""
    return "; ".join(
        value if len(having) == runs else f"{value} (run {_numbers_text(having)})"
        for value, having in values.items()
    )


def _numbers_text(numbers: Sequence[int]) -> str:
    """``"1-3, 7"``."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(str(g[0]) if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in groups)


TABLES = {
    "performance machine": machine_list,
    "performance summary": summary,
    "performance": comparison_table,
    "performance runs": runs_list,
}
