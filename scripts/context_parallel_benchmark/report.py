"""Measurements as JSON and as a Markdown table."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from benchmark_report import StoredReport, markdown_table
from context_parallel_benchmark.row import Row, shortened

NAME = "context_parallel"

EXPLANATION = """\
- One attention layer with its projections, batch 1, tensor-parallel size 1; **ours** is
  `AbsorbedMLASelfAttention`, **megatron** Megatron-Core's `MLASelfAttention`. Input and output
  gradient are random normal values.
- **ran**: the form and the backend that computed the attention of our layer.
- **forward**, **step** (forward and backward): median of the repetitions, in brackets the shortest
  and longest; of each repetition the slowest rank's time, from when all ranks begin.
- **kept**: allocated by forward and not freed before backward. **peak**: the most allocated during
  a step. Both beyond the weights, the input and the output gradient, of the rank with most.
- **bytes per token**: what a rank sends, for each of its own tokens and each other rank, in forward
  and in backward. A point-to-point message counts its bytes; collectives count as in a ring: an
  all-gather of x over n ranks (n - 1) x, a reduce-scatter of n x (n - 1) x, an all-reduce of x
  2 (n - 1) / n x.
- **of megatron's**: bytes and time of a step and kept memory, divided by those of Megatron's layer
  on the same input with the same recomputation.
- **overlap**: fraction of the time of NCCL's kernels, waiting included, that other kernels run in,
  in forward and in backward; the lowest rank's.
- GiB is 2^30 bytes, k in numbers of tokens 1024."""


@dataclass(frozen=True)
class Report(StoredReport):
    """One run of the script.

    Attributes:
        environment: From ``machine.describe``.
        rows: In the order they were measured.
    """

    entry = Row
    environment: dict
    rows: Sequence[Row]

    def peer(self, row: Row) -> Row | None:
        """Megatron's layer on the same input with the same recomputation, if it was measured."""
        for other in self.rows:
            theirs = other.case.implementation == "megatron" and not other.error
            if theirs and _input(other) == _input(row):
                return other
        return None


def markdown(reports: Sequence[Report]) -> str:
    """The whole report."""
    parts = ["# Context parallelism", *(_measured(report) for report in reports)]
    parts += [table(reports), errors(reports), f"![Time and bytes]({NAME}.png)", EXPLANATION]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(reports: Sequence[Report]) -> str:
    """One line for each case that was measured."""
    head = ["ranks", "layout", "S", "heads", "layer", "recompute", "exchange", "form", "ran"]
    head += ["forward", "step", "kept", "peak", "bytes per token"]
    head += ["of megatron's: bytes", "time", "kept", "overlap"]
    good = ((row, report) for report in reports for row in report.rows if not row.error)
    words = ("layout", "layer", "recompute", "exchange", "form", "ran")
    return markdown_table(head, (_line(row, report) for row, report in good), words)


def errors(reports: Sequence[Report]) -> str:
    """The cases that failed, by the beginning of why; empty without any."""
    failed: dict[str, list[str]] = defaultdict(list)
    for report in reports:
        for row in report.rows:
            if row.error:
                failed[shortened(row.error)].append(f"{row.case} on {row.cp_size} ranks")
    lines = [f"- {error}: {'; '.join(names)}" for error, names in failed.items()]
    return "\n".join(["Not measured:", "", *lines]) if lines else ""


def summary(reports: Sequence[Report]) -> str:
    """The figures as one line of JSON."""
    return json.dumps(
        [
            {"environment": report.environment, "rows": [row.brief() for row in report.rows]}
            for report in reports
        ]
    )


def tokens_text(tokens: int) -> str:
    """``"16k"`` where that is exact."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def _measured(report: Report) -> str:
    about = report.environment
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    dims = ", ".join(f"{name} {size}" for name, size in about["dims"].items())
    return (
        f"{about['processes']} ranks, measured on {about['date']} by `{about['command']}` at "
        f"{about['commit']}: {about['device']}, {about['backend']}, {about['dtype']}; {dims}, "
        f"{about['rope_type']}; {versions}."
    )


def _line(row: Row, report: Report) -> list[str]:
    case = row.case
    layout = f"thd, {case.documents} documents" if case.layout == "thd" else case.layout
    per_token = (row.forward_bytes_per_token, row.backward_bytes_per_token)
    return [
        str(row.cp_size),
        layout,
        tokens_text(case.tokens),
        str(case.heads),
        case.implementation,
        "-" if case.recompute == "none" else case.recompute,
        case.cp_comm_type,
        case.form,
        row.ran or "-",
        _milliseconds(row.forward_seconds),
        _milliseconds(row.step_seconds),
        _gibibytes(row.kept_bytes),
        _gibibytes(row.peak_bytes),
        " + ".join(f"{value:,.0f}" for value in per_token),
        *_of_peer(row, report.peer(row)),
        _overlap(row),
    ]


def _of_peer(row: Row, peer: Row | None) -> Iterator[str]:
    """Bytes and time of a step, and kept memory, relative to ``peer``'s."""
    if peer is None or peer is row:
        yield from ("-", "-", "-")
        return
    sent, theirs = (r.forward_sent_bytes + r.backward_sent_bytes for r in (row, peer))
    yield f"{sent / theirs:.3f}" if theirs else "-"
    yield f"{median(row.step_seconds) / median(peer.step_seconds):.2f}"
    yield f"{row.kept_bytes / peer.kept_bytes:.2f}" if row.kept_bytes and peer.kept_bytes else "-"


def _input(row: Row) -> tuple:
    case = row.case
    return row.cp_size, case.layout, case.documents, case.tokens, case.heads, case.recompute


def _milliseconds(seconds: Sequence[float]) -> str:
    middle, least, most = (1e3 * f(seconds) for f in (median, min, max))
    return f"{middle:.1f} ({least:.1f} - {most:.1f}) ms"


def _gibibytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**30:.2f} GiB"


def _overlap(row: Row) -> str:
    both = (row.forward_overlap, row.backward_overlap)
    if both == (None, None):
        return "-"
    return ", ".join("-" if one is None else f"{100 * one:.0f} %" for one in both)
