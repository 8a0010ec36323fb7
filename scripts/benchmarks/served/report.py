"""What was measured of implementations that serve, and the tables of those that are compared.

Ours beside vLLM's, and parity mode beside the default mode.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks import kit
from benchmarks.kit.arguments import count, parse_size
from benchmarks.served.burst import size_range


@dataclass(frozen=True)
class Size:
    """A row's requests, tokens of each prompt, tokens of each output, and rounds.

    With several rounds there are so many times the requests in all, of varying sizes, and one
    takes the place of each that ends: see ``Burst``.
    """

    requests: int
    prompt: int
    output: int
    rounds: int = 1

    def __str__(self) -> str:
        one = f"{self.requests} x {kit.tokens_text(self.prompt)}/{kit.tokens_text(self.output)}"
        return one if self.rounds == 1 else f"{one} * {self.rounds}"

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its output."""
        if self.rounds == 1:
            return self.prompt + self.output
        return size_range(self.prompt)[1] + size_range(self.output)[1]


@dataclass(frozen=True)
class Case(kit.Case):
    """One implementation at one size."""

    text = "{0.implementation}, {0.work}"
    implementation: str
    size: Size
    temperature: float

    @property
    def work(self) -> str:
        """What it has to do."""
        return f"{self.size}" + (f", temperature {self.temperature:g}" if self.temperature else "")


@dataclass(frozen=True, kw_only=True)
class Row(kit.Row):
    """What the users of an implementation see; medians of the repetitions."""

    ttft_ms: float | None = None  # time to first token, of the median request
    ttft_mean_ms: float | None = None  # of all requests
    ttft_p90_ms: float | None = None  # of the 90th percentile
    prefill_tokens_per_second: float | None = None  # input, while outputs have one token
    decode_tokens_per_second: float | None = None  # while all requests generate
    step_ms: float | None = None  # then, per token of a request
    decode_rates: list[float] = field(default_factory=list)  # of the repetitions
    output_tokens_per_second: float | None = None  # of traffic, over its whole time
    token_ms: float | None = None  # of traffic, of a request per token after its first
    token_p90_ms: float | None = None  # of the 90th percentile
    output_rates: list[float] = field(default_factory=list)  # of the repetitions
    start_seconds: float | None = None  # from its start until it was ready


FIGURES = tuple(
    one.name for one in dataclasses.fields(Row) if one.name.endswith(("_ms", "_per_second"))
)
# Implementations and what they are compared with.
_VLLM = {"ours": "vllm", "ours-server": "vllm-server"}
_DEFAULT = {"ours-parity": "ours", "ours-parity-parts": "ours-parity"}
# Columns of the tables, their figures, and how these are written.
_BURSTS = {
    "TTFT ms": ("ttft_ms", "{:,.0f}"),
    "prefill tokens/s": ("prefill_tokens_per_second", "{:,.0f}"),
    "decode tokens/s": ("decode_tokens_per_second", "{:,.0f}"),
}
_PER_SECOND = " tokens/s"
_TRAFFIC = {
    "output tokens/s": ("output_tokens_per_second", "{:,.0f}"),
    "TTFT ms": ("ttft_ms", "{:,.0f}"),
    "TTFT p90 ms": ("ttft_p90_ms", "{:,.0f}"),
    "ms per token": ("token_ms", "{:,.1f}"),
    "ms per token p90": ("token_p90_ms", "{:,.1f}"),
}


class ServingReport(kit.Report):
    """One run."""

    row, case = Row, Case

    def figures(self, row: Row) -> dict[str, float]:
        """What was measured."""
        found = {name: getattr(row, name) for name in FIGURES}
        return {name: value for name, value in found.items() if value is not None}

    def peer(self, row: Row) -> Row | None:
        """The row of vLLM of the same size, for one of ours."""
        return self._other(row, _VLLM)

    def default(self, row: Row) -> Row | None:
        """The row of the default mode of the same size, for one of parity mode."""
        return self._other(row, _DEFAULT)

    def _other(self, row: Row, names: dict[str, str]) -> Row | None:
        name = names.get(row.case.implementation)
        case = name and dataclasses.replace(row.case, implementation=name)
        return next((one for one in self.measured if one.case == case), None)

    @classmethod
    def notes(cls, reports: Sequence[ServingReport]) -> list[str]:
        """The tables of each report."""
        return [
            one(report, traffic=traffic)
            for report in reports
            for one in (table, parity_table)
            for traffic in (False, True)
        ]


def table(report: ServingReport, *, traffic: bool = False) -> str:
    """Each row of ours with that of vLLM of the same size; ratios are ours of theirs.

    Of requests that arrive at once, or of traffic; empty if there are none.
    """
    rows = [one for one in _rows(report, traffic) if one.case.implementation not in _DEFAULT]
    lines = []
    for row in rows:
        if any(report.peer(one) is row for one in rows):
            continue
        peer, line = report.peer(row), [row.case.implementation, row.case.work]
        for name, form in _columns(traffic).values():
            own, theirs = getattr(row, name), peer and getattr(peer, name)
            line += [*_texts(form, own, theirs), _ratio(own, theirs)]
        lines.append(line)
    head = ["", _sizes(traffic)]
    head += [f"{name}{what}" for name in _columns(traffic) for what in ("", ", vLLM", ", ratio")]
    return kit.markdown_table(head, lines, head[:2]) if lines else ""


def parity_table(report: ServingReport, *, traffic: bool = False) -> str:
    """Each row of parity mode with the default mode's; ratios are of times, parity mode's of its.

    Of requests that arrive at once, or of traffic; empty if there are none.
    """
    lines, head = [], [_sizes(traffic)]
    for row in _rows(report, traffic):
        if row.case.implementation not in _DEFAULT:
            continue
        default, line = report.default(row), [row.case.work]
        for column, (name, form) in _columns(traffic).items():
            own, other = getattr(row, name), default and getattr(default, name)
            times = (other, own) if column.endswith(_PER_SECOND) else (own, other)
            line += [*_texts(form, other, own), _ratio(*times)]
        lines.append(line)
    for column in _columns(traffic):
        is_rate = column.endswith(_PER_SECOND)
        ratio = f"{column.removesuffix(_PER_SECOND)}, ratio{' of times' if is_rate else ''}"
        head += [column, f"{column}, parity", ratio]
    return kit.markdown_table(head, lines, head[:1]) if lines else ""


def _columns(traffic: bool) -> dict[str, tuple[str, str]]:
    return _TRAFFIC if traffic else _BURSTS


def _rows(report: ServingReport, traffic: bool) -> list[Row]:
    """The measured ones of traffic, or of requests that arrive at once."""
    return [row for row in report.measured if (row.case.size.rounds > 1) is traffic]


def _sizes(traffic: bool) -> str:
    """Head of the column that says what a row has to do."""
    return "requests x prompt/output" + " * rounds" * traffic


def _texts(form: str, *values: float | None) -> list[str]:
    return [form.format(one) if one else "-" for one in values]


def _ratio(one: float | None, other: float | None) -> str:
    return f"{one / other:.2f}" if one and other else "-"


def parse_row(text: str) -> Size:
    """``"32x1k/256"``: requests, prompt tokens, output tokens; ``"64x1k/256*4"``: and rounds."""
    match = re.fullmatch(r"(\d+)x(\w+)/(\w+)(?:\*(\d+))?", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(
            f"expected rows such as 32x1k/256 or 64x1k/256*4, got {text!r}"
        )
    prompt, output, rounds = parse_size(match[2]), parse_size(match[3]), match[4]
    if rounds and int(rounds) < 2:
        raise argparse.ArgumentTypeError(f"expected at least 2 rounds after *, got {text!r}")
    return Size(count(match[1]), prompt, output, int(rounds or 1))
