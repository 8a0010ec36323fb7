"""Training in Megatron's own loop: pretraining.py's results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.kit.report import Times
from benchmarks.pretraining import PretrainingReport
from checks.performance.row import Row


def pretraining_rows(path: Path) -> Iterator[Row]:
    """An iteration with our attention beside one with Megatron's."""
    report = PretrainingReport.read(path)
    runs = {run.attention: run for run in report.measured if run.timed}
    if {"absorbed", "standard"} <= set(runs):
        ours, theirs = (
            Times.of([one.seconds for one in runs[name].timed]) for name in ("absorbed", "standard")
        )
        tokens = report.environment["tokens_per_iteration"]
        size = f"{(runs['absorbed'].parameters or 0) / 1e6:.0f} M parameters"
        yield Row(f"one iteration of {tokens} tokens, {size}", "Megatron's own MLA", ours, theirs)
