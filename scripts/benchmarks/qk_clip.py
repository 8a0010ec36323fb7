#!/usr/bin/env python3
"""Measure QK-clip: the largest scores that backends record, what they cost, and ``clip_qk``.

    $ python scripts/benchmarks/qk_clip.py --json qk_clip.json
    $ python scripts/benchmarks/qk_clip.py --suites maxima,cost --backends hopper --json hopper.json
    $ torchrun --nproc-per-node 2 scripts/benchmarks/qk_clip.py --suites clip --json clip.json
    $ python scripts/benchmarks/qk_clip.py --render qk_clip.json

Suite "maxima": the largest score of every head beside float64, of one causal sequence (sbhd) and of
a pack with padding whose rows would give larger ones (thd). "worst" is the largest deviation,
"above_bound" by how much a score exceeds the upper bound that was recorded in its place at most
(below 0 for a bound).
Suite "cost": forward, and forward with backward, with the largest scores over without them, in
turn; the attention of every backend, and the whole layer with what "auto" takes. "log" wants every
largest score, "clip" those above a threshold of 100 exactly; only backends that search by the LSE
(cudnn, flash_attention_4) tell them apart. With "flat" scores no row can be left out of a search,
with "peaked" ones most can.
Suite "clip": clip_qk() on several layers, with bf16 weights alone ("none") and with shards of fp32
copies on all ranks ("distributed"), where no head or half of them are above the threshold; and how
often the host waits for the GPU.

The dimensions are DeepSeek-V3's; a GPU computes in bfloat16, a CPU in float32 (to try the script:
--device cpu with small dimensions). If a case fails, its row has the error, and the others are
measured. Output:

    3.1 s  cost hopper n=16 S=8192 sbhd log flat: forward_ms 4.2, ..., step_ratio 1.002

The exit code is 1 if a maximum is wrong, or an fp32 copy ("copies_off") is not its weight's. The
last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.kit import arguments, provenance
from benchmarks.kit.arguments import DIMS, dims_of, list_of, one_of, parse_sizes
from benchmarks.kit.report import Report, read_dataclass
from benchmarks.kit.run import Benchmark
from benchmarks.kit.tables import markdown_table, tokens_text
from benchmarks.qk_clip_attention import (
    BACKENDS,
    LAYER,
    AttentionCase,
    AttentionRow,
    measure_attention,
)
from benchmarks.qk_clip_model import CLIPPED, MASTERS, ClipCase, ClipRow, measure_clip
from console.parser import Parser
from console.script import leave

SUITES = ("maxima", "cost", "clip")
SEARCHING = ("cudnn", "flash_attention_4")
# Of a maximum in fp32 from products in bf16, which are exact, in another order of summation.
TOLERANCE = 1e-4
# Twice that of rounding to bf16.
COPIES_TOLERANCE = 2**-7
# The reference is slow, and its cost is nobody's.
UNTIMED = ("reference",)


def cases(args: argparse.Namespace) -> Iterator[AttentionCase | ClipCase]:
    """All cases of the command line, but for --only."""
    backends = [name for name in args.backends if name != LAYER]
    if "maxima" in args.suites:
        for name in backends:
            for heads in args.heads:
                for layout in ("sbhd", "thd"):
                    for wanted in ("log", "clip") if name in SEARCHING else ("log",):
                        tokens = args.maxima_tokens
                        yield AttentionCase("maxima", name, heads, tokens, layout, wanted)
    if "cost" in args.suites:
        for heads in args.heads:
            for name in args.backends:
                yield from cost_cases(name, heads, args.tokens)
    if "clip" in args.suites:
        for masters in MASTERS:
            for clipped in CLIPPED:
                yield ClipCase(max(args.heads), args.layers, masters, clipped)


def cost_cases(name: str, heads: int, tokens: int) -> Iterator[AttentionCase]:
    """Of one backend, or of the layer."""
    if name in UNTIMED:
        return
    if name in SEARCHING:
        yield AttentionCase("cost", name, heads, tokens, wanted="clip")
        yield AttentionCase("cost", name, heads, tokens, scores="peaked")
    if name == LAYER:
        yield AttentionCase("cost", name, heads, tokens, wanted="clip")
    yield AttentionCase("cost", name, heads, tokens)


class QKClipReport(Report):
    """Rows of two kinds."""

    row = AttentionRow

    def figures(self, row: AttentionRow | ClipRow) -> dict[str, float]:
        """The row's own."""
        return row.figures()

    @classmethod
    def read(cls, path: Path) -> QKClipReport:
        """See ``Report``; a row's type is that of its case."""
        from benchmarks.kit.report import read_json

        def build(content: dict) -> QKClipReport:
            kinds = {True: ClipRow, False: AttentionRow}
            rows = [
                read_dataclass(kinds[one["case"]["suite"] == "clip"], one)
                for one in content[cls.rows_key]
            ]
            return cls(content[cls.environment_key], rows)

        return read_json(path, build)

    @classmethod
    def notes(cls, reports: Sequence[QKClipReport]) -> list[str]:
        """A table of each suite."""
        rows = [row for report in reports for row in report.measured]
        return [_table([row for row in rows if row.case.suite == suite]) for suite in SUITES]


def _table(rows: list[AttentionRow | ClipRow]) -> str:
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row.figures()))
    lines = []
    for row in rows:
        figures = row.figures()
        cells = (f"{figures[name]:.4g}" if name in figures else "" for name in names)
        lines.append([str(row.case), *cells])
    return markdown_table(["case", *names], lines, words=("case",))


class QKClipBenchmark(Benchmark):
    """Attention and ``clip_qk``."""

    script = "qk_clip.py"
    report = QKClipReport

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        arguments.use_device(args.device)
        from benchmarks.kit.processes import Processes

        self.processes = Processes(args.seed)

    @classmethod
    def add_options(cls, parser: Parser) -> None:
        """See --help."""
        add = parser.add_argument
        arguments.add_common(parser, json=None, render=None, only=None, device=None, seed=1234)
        arguments.add_common(parser, heads="16,128", seconds_per_row=0.4, time_limit=90.0)
        add("--suites", type=list_of(one_of(SUITES)), default=",".join(SUITES), help="what to do")
        every = (*BACKENDS, LAYER)
        default = [name for name in every if name not in ("triton", "reference")]
        text = "backends of the attention, and the layer"
        add("--backends", type=list_of(one_of(every)), default=",".join(default), help=text)
        size = parse_sizes
        add("--tokens", type=_one(size), default="8k", help='tokens of the sequence in "cost"')
        add("--maxima-tokens", type=_one(size), default="1k", help='likewise in "maxima"')
        add("--layers", type=arguments.count, default=8, help='layers of the model in "clip"')
        arguments.add_dims(parser, DIMS)

    def environment(self) -> dict:
        """With the number of processes."""
        return provenance.describe(
            self.processes.on_gpu,
            self.processes.dtype,
            dims=dims_of(self.args),
            processes=self.processes.size,
            tokens=tokens_text(self.args.tokens),
        )

    def cases(self) -> list[AttentionCase | ClipCase]:
        """By suite."""
        return arguments.chosen(cases(self.args), self.args.only)

    def measure(self, case: AttentionCase | ClipCase) -> AttentionRow | ClipRow:
        """The row of a case."""
        if isinstance(case, ClipCase):
            return measure_clip(case, self.args, self.processes)
        return measure_attention(case, self.args, self.processes)

    def failed(self, case: AttentionCase | ClipCase, error: str) -> AttentionRow | ClipRow:
        """The row of a case without figures."""
        if isinstance(case, ClipCase):
            return ClipRow(case, error=error)
        return AttentionRow(case, error=error)

    def exit_code(self, report: Report) -> int:
        """1 if a maximum or an fp32 copy is wrong."""
        limits = {"worst": TOLERANCE, "above_bound": TOLERANCE, "copies_off": COPIES_TOLERANCE}
        wrong = [
            f"{row.case}: {name} {value:.3g}"
            for row in report.measured
            for name, value in row.figures().items()
            if not value <= limits.get(name, value)
        ]
        for one in wrong:
            print(f"qk_clip.py: wrong: {one}", file=sys.stderr)
        return int(bool(wrong))


def _one(parse):
    """A parser of one value of a list."""

    def parse_one(text: str) -> int:
        values = parse(text)
        if len(values) != 1:
            raise argparse.ArgumentTypeError(f"expected one number, got {text!r}")
        return values[0]

    return parse_one


if __name__ == "__main__":
    leave(QKClipBenchmark.main())
