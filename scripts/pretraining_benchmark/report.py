"""Two trainings as JSON, a Markdown table and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmark_report import StoredReport, can_plot, figure, markdown_table
from context_parallel_benchmark.row import shortened
from pretraining_benchmark.runs import Run

NAME = "pretraining"
EXPLANATION = """\
- Both models go through `megatron.training.pretrain` with the same arguments, first weights and
  mock data; **standard** is Megatron-Core's `MLASelfAttention`, **absorbed** is
  `AbsorbedMLASelfAttention` through `--spec`.
- **ran**: the form and the backend that computed the attention of our layers.
- **iteration**: median of Megatron's own times after the first ones, in brackets the shortest and
  longest. **TFLOP/s** of one GPU by Megatron's count, in which backward is twice forward and causal
  attention half; **MFU** is their part of the peak.
- **peak**: the most memory allocated on a GPU when Megatron last reported it, in its second
  iteration.
- **difference**: of the losses of one iteration, the largest; "last" is the mean of the last ten
  iterations."""


@dataclass(frozen=True)
class Report(StoredReport):
    """One call of the script.

    Attributes:
        environment: What it was measured on and with.
        runs: In the order they ran.
    """

    entries = "runs"
    entry = Run
    environment: dict
    runs: Sequence[Run]

    @property
    def good(self) -> list[Run]:
        """The runs that ended well."""
        return [run for run in self.runs if not run.error]

    def tokens_per_second(self, run: Run) -> float:
        """Of all GPUs together."""
        return self.environment["tokens_per_iteration"] / run.seconds

    def mfu(self, run: Run) -> float | None:
        """Part of the peak; None on a CPU."""
        peak = self.environment["peak_tflops"]
        return run.tflops / peak if peak else None

    def differences(self) -> list[dict]:
        """Largest difference of the losses of each run and the one before it."""
        found = []
        for left, right in pairwise(self.good):
            gaps = [abs(a.loss - b.loss) for a, b in zip(left.iterations, right.iterations)]
            last = [
                sum(one.loss for one in run.iterations[-10:]) / len(run.iterations[-10:])
                for run in (left, right)
            ]
            found.append(
                {
                    "runs": [left.name, right.name],
                    "largest": max(gaps),
                    "largest_at": 1 + gaps.index(max(gaps)),
                    "last": last[1] - last[0],
                }
            )
        return found


def markdown(report: Report) -> str:
    """The whole report."""
    about = report.environment
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    model = ", ".join(f"{name} {size}" for name, size in about["model"].items())
    measured = (
        f"Measured on {about['date']} by `{about['command']}` at {about['commit']}: "
        f"{about['device']}, {about['dtype']}; {model}; "
        f"{about['tokens_per_iteration']:,} tokens per iteration; {versions}."
    )
    parts = ["# Pretraining through Megatron's own loop", measured, table(report)]
    parts += [differences_text(report), errors(report), f"![Loss]({NAME}.png)", EXPLANATION]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(report: Report) -> str:
    """One line for each run that ended well."""
    head = ["attention", "ran", "parameters", "iteration", "tokens/s", "TFLOP/s", "MFU", "peak"]
    head += ["first loss", "last loss"]
    lines = (_line(run, report) for run in report.good)
    return markdown_table(head, lines, ("attention", "ran"))


def differences_text(report: Report) -> str:
    """The losses' differences in words."""
    return "\n".join(
        f"- {' and '.join(one['runs'])}: largest difference of the loss {one['largest']:.1e}, in "
        f"iteration {one['largest_at']}; of the mean of the last ten {one['last']:+.1e}"
        for one in report.differences()
    )


def errors(report: Report) -> str:
    """The runs that failed, and why; empty without any."""
    lines = [f"- {run.name}: {shortened(run.error)}" for run in report.runs if run.error]
    return "\n".join(["Failed:", "", *lines]) if lines else ""


def summary(report: Report) -> str:
    """The figures as one line of JSON."""
    runs: list[dict] = []
    for run in report.runs:
        if run.error:
            runs.append({"name": run.name, "error": shortened(run.error)})
            continue
        runs.append(
            {
                "name": run.name,
                "ran": run.ran,
                "iteration_ms": round(1e3 * run.seconds, 1),
                "tokens_per_second": round(report.tokens_per_second(run)),
                "tflops": run.tflops,
                "mfu": report.mfu(run),
                "peak_bytes": run.peak_bytes,
                "last_loss": run.iterations[-1].loss,
            }
        )
    return json.dumps({"runs": runs, "differences": report.differences()})


def plot(report: Report, path: Path) -> bool:
    """Losses, and how far they differ.

    Returns:
        False if there is nothing to draw, or matplotlib is missing.
    """
    if not report.good or not can_plot():
        return False
    with figure(path, 1, 2, (11, 4)) as [(losses, gaps)]:
        for number, run in enumerate(report.good):
            # The first is wider: equal curves stay visible.
            width = 2.5 if number == 0 else 1.0
            curve = [(one.iteration, one.loss) for one in run.iterations]
            losses.plot(*zip(*curve), linewidth=width, label=run.name)
        for left, right in pairwise(report.good):
            pairs = zip(left.iterations, right.iterations)
            curve = [(a.iteration, a.loss - b.loss) for a, b in pairs]
            gaps.plot(*zip(*curve), label=f"{left.name} - {right.name}")
        for axes, title in ((losses, "loss per token (nats)"), (gaps, "difference of the losses")):
            axes.set_xlabel("iteration")
            axes.set_ylabel(title)
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend(fontsize=8)
    return True


def _line(run: Run, report: Report) -> list[str]:
    times = [1e3 * f(one.seconds for one in run.timed) for f in (min, max)]
    mfu = report.mfu(run)
    return [
        run.name,
        run.ran or "-",
        f"{(run.parameters or 0) / 1e6:,.0f} M",
        f"{1e3 * run.seconds:.1f} ({times[0]:.1f} - {times[1]:.1f}) ms",
        f"{report.tokens_per_second(run):,.0f}",
        f"{run.tflops:.1f}",
        "-" if mfu is None else f"{100 * mfu:.1f} %",
        "-" if run.peak_bytes is None else f"{run.peak_bytes / 2**30:.2f} GiB",
        f"{run.iterations[0].loss:.4f}",
        f"{run.iterations[-1].loss:.4f}",
    ]
