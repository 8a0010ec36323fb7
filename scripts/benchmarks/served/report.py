"""What was measured of implementations that serve, and the table of ours beside vLLM."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.kit.arguments import count, parse_sizes
from benchmarks.kit.plot import Panel, collected
from benchmarks.kit.report import Report
from benchmarks.kit.tables import markdown_table, tokens_text


@dataclass(frozen=True)
class Size:
    """A row's requests, tokens of each prompt, and tokens of each output."""

    requests: int
    prompt: int
    output: int

    def __str__(self) -> str:
        return f"{self.requests} x {tokens_text(self.prompt)}/{tokens_text(self.output)}"


@dataclass(frozen=True)
class Case:
    """One implementation at one size."""

    implementation: str
    size: Size
    temperature: float

    @property
    def work(self) -> str:
        """What it has to do."""
        return (
            f"{self.size}, temperature {self.temperature:g}" if self.temperature else str(self.size)
        )

    def __str__(self) -> str:
        return f"{self.implementation}, {self.work}"


@dataclass(frozen=True)
class Row:
    """What the users of an implementation see; medians of the repetitions.

    Attributes:
        case: What ran.
        error: What went wrong; ``""`` if nothing did.
        ttft_ms: To the first token, the median of the requests.
        ttft_p90_ms: The same of the slowest tenth's best.
        prefill_tokens_per_second: Prompt tokens, of requests with one output token.
        decode_tokens_per_second: While all requests generate; None if that is never so.
        step_ms: Of a token of each request, at that rate.
        decode_rates: Tokens per second of every repetition.
        start_seconds: From the start of the process until it took requests.
    """

    case: Case
    error: str = ""
    ttft_ms: float | None = None
    ttft_p90_ms: float | None = None
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    step_ms: float | None = None
    decode_rates: list[float] = field(default_factory=list)
    start_seconds: float | None = None


FIGURES = (
    "ttft_ms",
    "ttft_p90_ms",
    "prefill_tokens_per_second",
    "decode_tokens_per_second",
    "step_ms",
)


class ServingReport(Report):
    """One run."""

    row = Row

    def figures(self, row: Row) -> dict[str, float]:
        """What was measured."""
        found = {name: getattr(row, name) for name in FIGURES}
        return {name: value for name, value in found.items() if value is not None}

    def peer(self, row: Row) -> Row | None:
        """The row of vLLM of the same size, for one of ours."""
        name = row.case.implementation.replace("ours", "vllm")
        if name == row.case.implementation:
            return None
        case = dataclasses.replace(row.case, implementation=name)
        return next((one for one in self.measured if one.case == case), None)

    @classmethod
    def panels(cls, reports: Sequence[ServingReport]) -> list[Panel]:
        """Decode tokens per second over the number of requests."""
        return collected(
            (
                (
                    f"prompts of {tokens_text(row.case.size.prompt)}: decode tokens/s",
                    row.case.implementation,
                    row.case.size.requests,
                    row.decode_tokens_per_second,
                )
                for report in reports
                for row in report.measured
                if row.decode_tokens_per_second
            ),
            "requests",
        )

    @classmethod
    def notes(cls, reports: Sequence[ServingReport]) -> list[str]:
        """One table per report."""
        return [table(report) for report in reports if report.measured]


def table(report: ServingReport) -> str:
    """Each row of ours with that of vLLM of the same size; ratios are ours of theirs."""
    columns = {
        "TTFT ms": ("ttft_ms", "{:,.0f}"),
        "prefill tokens/s": ("prefill_tokens_per_second", "{:,.0f}"),
        "decode tokens/s": ("decode_tokens_per_second", "{:,.0f}"),
    }
    lines = []
    for row in report.measured:
        if any(report.peer(one) is row for one in report.measured):
            continue
        peer, line = report.peer(row), [row.case.implementation, row.case.work]
        for name, form in columns.values():
            own, theirs = getattr(row, name), peer and getattr(peer, name)
            line += [form.format(one) if one else "-" for one in (own, theirs)]
            line.append(f"{own / theirs:.2f}" if own and theirs else "-")
        lines.append(line)
    head = ["", "requests x prompt/output"]
    head += [f"{name}{what}" for name in columns for what in ("", ", vLLM", ", ratio")]
    return markdown_table(head, lines, head[:2])


def parse_row(text: str) -> Size:
    """``"32x1k/256"``: requests, prompt tokens, output tokens."""
    match = re.fullmatch(r"(\d+)x(\w+)/(\w+)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"expected rows such as 32x1k/256, got {text!r}")
    [prompt], [output] = parse_sizes(match[2]), parse_sizes(match[3])
    return Size(count(match[1]), prompt, output)
