#!/usr/bin/env python3
"""Measure what standard MLA fuses, RoPE and the down-projections of query and K/V, beside ours.

    $ python scripts/benchmarks/fusions.py --json docs/attention/fusions.json
    $ python scripts/benchmarks/fusions.py --cases query,keys --heads 128 --block-heads 4,8,16,32,64

Megatron's options are apply_rope_fusion and mla_down_proj_fusion.

query   rotation of a query, in place: ours, Megatron's fused kernel, a copy of the same bytes
keys    latent and k_rope to keys and values and back: ours, and Megatron's up-projection with its
        fused kernel, which also copies keys and values apart; "rope alone" is without the products
down    hidden states to both down-projections as two products or one, of tensors and of layers
layer   our whole attention layer with separate and with fused down-projections

All works of a case are run in turns; figures are medians. Times are the GPU's, which is kept busy
while the host queues a turn; "host" is what the host takes to queue a step. "difference" compares
outputs with those of the first work. Megatron's kernels are tuned over --block-heads.

    12.3 s  query n=16 S=4096: ours 14.1 us, megatron's fused RoPE 15.2 us, copy 12.0 us

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.kit import arguments, provenance
from benchmarks.kit.arguments import DIMS, dims_of, list_of, one_of, parse_sizes
from benchmarks.kit.report import Report
from benchmarks.kit.run import Benchmark
from benchmarks.kit.tables import markdown_table
from benchmarks.together import Measured, measure_together
from console.parser import Parser
from console.script import leave

KINDS = ("query", "keys", "down", "layer")
# That Megatron's tuner knows.
BLOCK_HEADS = ("1", "2", "4", "8", "16", "32", "64", "128")
_TIMES = ("forward us", "backward us", "step us", "host us")
_HEAD = ("case", "work", *_TIMES, "TB/s", "GiB", "difference")


@dataclass(frozen=True)
class Case:
    """One task, done by several works.

    Attributes:
        kind: One of :data:`KINDS`.
        heads: 0 where there are none.
        tokens: Of the sequence.
    """

    kind: str
    heads: int
    tokens: int

    def __str__(self) -> str:
        heads = f" n={self.heads}" if self.heads else ""
        return f"{self.kind}{heads} S={self.tokens}"


def cases(args: argparse.Namespace) -> list[Case]:
    """By kind, small ones first."""
    found = [
        Case(kind, heads, tokens)
        for kind in args.cases
        for heads in ([0] if kind == "down" else sorted(args.heads))
        for tokens in sorted(args.seq_lens)
    ]
    return arguments.chosen(found, args.only)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case with its works, or with the error that prevented all of them."""

    case: Case
    works: list[Measured] = field(default_factory=list)
    error: str = ""


class FusionsReport(Report):
    """One run."""

    row = Row

    def figures(self, row: Row) -> dict[str, float]:
        """Of all works, by work and name."""
        numbers = ((work.name, work.numbers().items()) for work in row.works)
        return {f"{name} {what}": value for name, found in numbers for what, value in found}

    def line(self, row: Row) -> str:
        """A row in one line: the steps of its works."""
        steps = [f"{w.name} {w.numbers()['step_us']:.1f} us" for w in row.works if not w.error]
        return super().line(row) if row.error else f"{row.case}: {', '.join(steps)}"

    @classmethod
    def notes(cls, reports: Sequence[FusionsReport]) -> list[str]:
        """A table of all works, and why some have no figures."""
        lines, errors = [], []
        for report in reports:
            for row in report.measured:
                for work in row.works:
                    if work.error:
                        errors.append(f"- {row.case}, {work.name}: {work.error}")
                    else:
                        lines.append([str(row.case), work.name, *_cells(work)])
        table = markdown_table(_HEAD, lines, ("case", "work")) if lines else ""
        return [table, "\n".join(errors)]


def _cells(work: Measured) -> list[str]:
    found = work.numbers()
    times = [f"{found[f'{name}_us']:.1f}" for name in ("forward", "backward", "step", "host")]
    rates = [f"{found[key]:.2f}" for key in ("forward_tbps", "backward_tbps") if key in found]
    peak = f"{found['peak_gib']:.2f}" if "peak_gib" in found else ""
    difference = f"{found['difference']:.1e}" if "difference" in found else ""
    return [*times, " / ".join(rates), peak, difference]


class FusionsBenchmark(Benchmark):
    """Works of the same task in turns."""

    script = "fusions.py"
    report = FusionsReport

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        arguments.use_device(args.device)
        from benchmarks.kit.processes import Processes

        self.processes = Processes(args.seed)

    @classmethod
    def add_options(cls, parser: Parser) -> None:
        """See --help."""
        add = parser.add_argument
        arguments.add_common(parser, render=None, json=None, only=None, device=None, seed=1234)
        arguments.add_common(parser, heads="16,128", seconds_per_row=0.25, time_limit=60.0)
        add("--cases", type=list_of(one_of(KINDS)), default=",".join(KINDS), help="what to measure")
        add("--seq-lens", type=parse_sizes, default="4k,8k", help="tokens of the sequence")
        text = "heads of one program of Megatron's kernels; its tuner compiles each, in seconds"
        add("--block-heads", type=list_of(one_of(BLOCK_HEADS)), default="8,32", help=text)
        arguments.add_dims(parser, DIMS)

    def environment(self) -> dict:
        """With the rates that the device reaches."""
        from benchmarks.kit.timing import ceilings

        return provenance.describe(
            self.processes.on_gpu,
            self.processes.dtype,
            dims=dims_of(self.args),
            block_heads=",".join(self.args.block_heads),
            ceilings=ceilings(self.processes.on_gpu),
        )

    def cases(self) -> list[Case]:
        """By kind."""
        return cases(self.args)

    def measure(self, case: Case) -> Row:
        """The works of a case."""
        works = measure_together(self._works(case), self.processes, self.args.seconds_per_row)
        return Row(case=case, works=works)

    def _works(self, case: Case) -> list:
        from benchmarks import fused_down, fused_rope

        args, processes = self.args, self.processes
        if case.kind == "down":
            return fused_down.down_works(case.tokens, args, processes)
        if case.kind == "layer":
            return fused_down.layer_works(case.heads, case.tokens, args, processes)
        works = {"query": fused_rope.query_works, "keys": fused_rope.key_works}[case.kind]
        return works(fused_rope.Sizes.of(args, case.heads, case.tokens), args, processes)


if __name__ == "__main__":
    leave(FusionsBenchmark.main())
