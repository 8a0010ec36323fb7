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

The dimensions are DeepSeek-V3's; a GPU computes in bfloat16, a CPU in float32. Output:

    3.1 s  cost hopper n=16 S=8192 sbhd log flat: forward_ms 4.2, ..., step_ratio 1.002

The exit code is 1 if a maximum is wrong, or an fp32 copy ("copies_off") is not its weight's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit
from benchmarks.qk_clip_attention import (
    BACKENDS,
    LAYER,
    AttentionCase,
    AttentionRow,
    measure_attention,
)
from benchmarks.qk_clip_model import CLIPPED, MASTERS, ClipCase, ClipRow, measure_clip

SUITES = ("maxima", "cost", "clip")
SEARCHING = ("cudnn", "flash_attention_4")
# Of a maximum in fp32 from products in bf16, which are exact, in another order of summation.
TOLERANCE = 1e-4
# Twice that of rounding to bf16.
COPIES_TOLERANCE = 2**-7
# The reference is slow, and its cost is nobody's.
UNTIMED = ("reference",)


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


class QKClipReport(kit.Report):
    """Rows of two kinds, that of its case."""

    row = AttentionRow

    def figures(self, row: AttentionRow | ClipRow) -> dict[str, float]:
        """The row's own."""
        return row.figures()

    @classmethod
    def row_type(cls, content: dict) -> type:
        """Of the suite."""
        return ClipRow if content["case"]["suite"] == "clip" else AttentionRow

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
    return kit.markdown_table(["case", *names], lines, words=("case",))


def _one_size(text: str) -> int:
    """One value of a list."""
    values = kit.parse_sizes(text)
    if len(values) != 1:
        raise argparse.ArgumentTypeError(f"expected one number, got {text!r}")
    return values[0]


_EVERY = (*BACKENDS, LAYER)


class QKClipBenchmark(kit.Benchmark):
    """Attention and ``clip_qk``."""

    report = QKClipReport
    options = kit.declare(
        "json render only device heads=16,128 seconds_per_row=0.4 time_limit=90 seed=1234",
        suites=kit.some("what to do", SUITES),
        backends=kit.some(
            "backends of the attention, and the layer",
            _EVERY,
            ",".join(name for name in _EVERY if name not in ("triton", "reference")),
        ),
        tokens=kit.Option('tokens of the sequence in "cost"', _one_size, "8k"),
        maxima_tokens=kit.Option('likewise in "maxima"', _one_size, "1k"),
        layers=kit.number('layers of the model in "clip"', 8),
        dims=kit.DIMS,
    )
    quick = "--tokens 12 --maxima-tokens 30 --layers 2 --backends reference,layer,hopper"
    recorded = ("dims",)

    def about(self) -> dict:
        """With the number of processes."""
        tokens = kit.tokens_text(self.args.tokens)
        return super().about() | {"processes": self.processes.size, "tokens": tokens}

    def cases(self) -> Iterator[AttentionCase | ClipCase]:
        """By suite."""
        args = self.args
        if "maxima" in args.suites:
            for name in (name for name in args.backends if name != LAYER):
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

    def measure(self, case: AttentionCase | ClipCase) -> AttentionRow | ClipRow:
        """The row of a case."""
        measure = measure_clip if isinstance(case, ClipCase) else measure_attention
        return measure(case, self.args, self.processes)

    def failed(self, case: AttentionCase | ClipCase, error: str) -> AttentionRow | ClipRow:
        """The row of a case without figures."""
        return (ClipRow if isinstance(case, ClipCase) else AttentionRow)(case=case, error=error)

    def exit_code(self, report: kit.Report) -> int:
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


if __name__ == "__main__":
    kit.main(QKClipBenchmark)
