#!/usr/bin/env python3
r"""Measure DeepSeek Sparse Attention: attention over chosen keys, and the indexer that chooses.

    $ python scripts/benchmarks/dsa.py --json dsa.json
    $ python scripts/benchmarks/dsa.py --only "backward n=128"
    $ TRITON_INTERPRET=1 python scripts/benchmarks/dsa.py --device cpu --heads 2 --queries 8 \
          --topk 8 --kv 32 --indexer 64 --kv-lora-rank 32 --qk-pos-emb-head-dim 16
    $ python scripts/benchmarks/dsa.py --render docs/dsa/kernels.json

Implementations of one input are repeated in turns. Indices are random, or shared by neighbours: a
key keeps its random number for 8 queries, so that two neighbours share 7/8 of their keys or more;
"union" is the number of keys of four neighbours over that of one. Outputs and gradients are
compared with the reference in fp32. TFLOP/s count what is useful,

    forward  2 * (2 * kv_lora_rank + rope)       per query, chosen key and head
    backward 10 * kv_lora_rank + 6 * rope + ..   that is 6 (C + R) + 4 C

whatever is computed for padding or twice. The indexer's row has 1024 queries in the middle of the
sequence; "share" is its time per query over that of the fastest sparse forward of 128 heads over as
many keys, "bound" the share that its operations alone have at the rate of the matrix product in
bf16, "agreement" the share of its choice that scores in fp32 choose, of random vectors.
FlashMLA is the library in vLLM's wheel, see ``peers/sparse.py``; TileLang the kernels in
Megatron-Core, see ``peers/tilelang.py``. Output:

    1.9 s  forward n=128 kv=8192 random: FlashMLA: ms 3.85, tflops 607, difference 0.002

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.dsa_inputs import Inputs, difference, expected, selection, union, whole
from benchmarks.kit import arguments, provenance
from benchmarks.kit.arguments import DIMS, parse_sizes
from benchmarks.kit.plot import Panel, collected
from benchmarks.kit.report import Refused, Report, Times, reason
from benchmarks.kit.run import Benchmark
from benchmarks.peers.sparse import flash_mla
from benchmarks.peers.tilelang import tilelang_backward, tilelang_forward
from console.parser import Parser
from console.script import leave

if TYPE_CHECKING:
    from torch import Tensor

_WIDTHS = ("kv-lora-rank", "qk-pos-emb-head-dim")
IMPLEMENTATIONS = {
    "forward": ("hopper", "triton", "FlashMLA", "TileLang"),
    "backward": ("hopper", "hopper, in order", "triton", "triton, in order", "TileLang"),
    "indexer": ("triton", "triton_fp8"),
}


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        work: "forward", "backward" or "indexer".
        heads: Of the attention; of the indexer in its rows.
        kv: Keys.
        shared: Whether neighbours share keys.
        implementation: One of :data:`IMPLEMENTATIONS`.
    """

    work: str
    heads: int
    kv: int
    shared: bool
    implementation: str

    def __str__(self) -> str:
        indices = "shared" if self.shared else "random"
        return f"{self.work} n={self.heads} kv={self.kv} {indices}: {self.implementation}"

    @property
    def input(self) -> tuple:
        """What cases that are compared have in common."""
        return self.work, self.heads, self.kv, self.shared


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case, or why there are no figures of it.

    Attributes:
        case: What was measured.
        times: Of one call; None if it was not measured.
        more: Other figures by name.
        error: Empty, or why figures are missing.
    """

    case: Case
    times: Times | None = None
    more: dict = field(default_factory=dict)
    error: str = ""


class DSAReport(Report):
    """One run."""

    row = Row

    def figures(self, row: Row) -> dict[str, float]:
        """Milliseconds, TFLOP/s, and what is compared."""
        assert row.times is not None
        flops = row.more.get("flops")
        rate = {"tflops": flops / row.times.median / 1e12} if flops else {}
        others = {name: value for name, value in row.more.items() if name != "flops"}
        return {"ms": round(row.times.median * 1e3, 4), **rate, **others}

    @classmethod
    def notes(cls, reports: Sequence[DSAReport]) -> list[str]:
        """The ceilings of each device."""
        return [provenance.ceilings_reached(report.environment) for report in reports]

    @classmethod
    def panels(cls, reports: Sequence[DSAReport]) -> list[Panel]:
        """TFLOP/s over the heads."""
        points = (
            (
                f"{case.work} kv={case.kv} {'shared' if case.shared else 'random'} [TFLOP/s]",
                case.implementation,
                case.heads,
                report.figures(row)["tflops"],
            )
            for report in reports
            for row in report.measured
            for case in (row.case,)
            if case.work != "indexer"
        )
        return collected(points, "heads")


class DSABenchmark(Benchmark):
    """All implementations of an input in turns."""

    script = "dsa.py"
    report = DSAReport

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        device = arguments.use_device(args.device)
        if device == "cpu":
            # Triton asks when a kernel is imported.
            os.environ.setdefault("TRITON_INTERPRET", "1")
        import torch

        self.device = torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.content, self.rope = args.kv_lora_rank, args.qk_pos_emb_head_dim
        self.scale = (self.content + self.rope) ** -0.5
        self._rows: dict[Case, Row] = {}
        self._ceilings: dict[str, float] = {}

    @classmethod
    def add_options(cls, parser: Parser) -> None:
        """See --help."""
        add = parser.add_argument
        arguments.add_common(parser, json=None, plot=None, render=None, only=None, device=None)
        arguments.add_common(
            parser, heads="128,64,16", seconds_per_row=0.1, time_limit=80.0, seed=1234
        )
        add("--queries", type=arguments.count, default=4096, help="queries of the attention")
        add("--topk", type=arguments.count, default=2048, help="keys that a query attends to")
        add("--kv", type=parse_sizes, default="8k,32k", help="keys of the attention")
        add("--indexer", type=parse_sizes, default="8k,32k,128k", help="keys of the indexer")
        add("--indexer-heads", type=arguments.count, default=64, help="heads of the indexer")
        arguments.add_dims(parser, {name: DIMS[name] for name in _WIDTHS})

    @classmethod
    def check(cls, parser: Parser, args: argparse.Namespace) -> None:
        """Keys are chosen among those that there are."""
        if args.topk > min(args.kv + args.indexer):
            parser.error(
                f"--topk must be at most the keys of --kv and --indexer: {args.topk} are more "
                f"than {min(args.kv + args.indexer)}"
            )

    def environment(self) -> dict:
        """With the rates that the device reaches."""
        from benchmarks.kit.timing import ceilings

        self._ceilings = ceilings(self.on_gpu)
        return provenance.describe(
            self.on_gpu,
            self.dtype,
            widths=[self.content, self.rope],
            queries=self.args.queries,
            topk=self.args.topk,
            ceilings=self._ceilings,
        )

    def cases(self) -> list[Case]:
        """The table of attention first, then the indexer."""
        found = [
            Case(work, heads, kv, shared, implementation)
            for work in ("forward", "backward")
            for heads in self.args.heads
            for kv in self.args.kv
            for shared in (False, True)
            for implementation in IMPLEMENTATIONS[work]
        ]
        found += [
            Case("indexer", self.args.indexer_heads, kv, False, backend)
            for kv in self.args.indexer
            for backend in IMPLEMENTATIONS["indexer"]
        ]
        return arguments.chosen(found, self.args.only)

    def measure(self, case: Case) -> Row:
        """Measure all implementations of the input with the first of them.

        Raises:
            Refused: With the reason of a case that could not be measured.
        """
        if case.work == "indexer":
            return self._measure_indexer(case)
        if case not in self._rows:
            self._rows = self._measure_together(case)
        row = self._rows[case]
        if row.error:
            raise Refused(row.error)
        return row

    def _measure_together(self, case: Case) -> dict[Case, Row]:
        from benchmarks.kit.timing import Repeated, in_turns, repetitions

        inputs = self._inputs(case)
        names = [c for c in self.cases() if c.input == case.input]
        rows, works, differences = {}, {}, {}
        wanted = expected(case.work, inputs, self.content, self.scale, self.dtype)
        for one in names:
            try:
                run = self._implementation(one, inputs, wanted)
                differences[one] = difference(run(), wanted)
                works[one] = Repeated(run, on_gpu=self.on_gpu)
                works[one].once()
            except Exception as error:  # of any kernel; the others are measured all the same
                rows[one] = Row(case=one, error=reason(error))
        if works:
            seconds = sum(work.once() for work in works.values())
            count = repetitions(seconds, self.args.seconds_per_row * len(works))
            flops = self._flops(case)
            shared = union(inputs.chosen)
            for one, steps in zip(works, in_turns([*works.values()], count)):
                more = {"flops": flops, "difference": differences[one], "union": shared}
                rows[one] = Row(case=one, times=Times.of([s for s, _, _ in steps]), more=more)
        return rows

    def _flops(self, case: Case) -> float:
        width, rope = self.content, self.rope
        pair = 2 * (2 * width + rope)
        if case.work == "backward":
            pair = 6 * (width + rope) + 4 * width
        return float(self.args.queries * self.args.topk * case.heads * pair)

    def _inputs(self, case: Case) -> Inputs:
        import torch

        make = torch.Generator(self.device).manual_seed(self.args.seed)
        random = partial(torch.randn, device=self.device, dtype=self.dtype, generator=make)
        queries = self.args.queries
        return Inputs(
            random(queries, 1, case.heads, self.content + self.rope),
            random(case.kv, 1, self.content + self.rope),
            random(queries, 1, case.heads, self.content),
            selection(queries, case.kv, self.args.topk, case.shared, make),
        )

    def _implementation(
        self, case: Case, inputs: Inputs, wanted: tuple[Tensor, ...]
    ) -> Callable[[], tuple[Tensor, ...]]:
        """A call that computes what is compared."""
        import torch

        from absorbed_mla.core_attention.types import AttentionOutput, OutputGradient
        from absorbed_mla.registry import SPARSE_BACKENDS

        name, _, in_order = case.implementation.partition(", ")
        if name in ("FlashMLA", "TileLang"):
            return self._peer(name, case.work, inputs, wanted)
        if name == "hopper" and not (
            self.on_gpu and torch.cuda.get_device_capability(self.device) == (9, 0)
        ):
            raise Refused("it needs compute capability 9.0")
        backend = SPARSE_BACKENDS[name]
        latent = inputs.latent(self.content)
        if case.work == "forward":
            return lambda: backend.forward(latent, inputs.chosen, self.scale)
        output = AttentionOutput(wanted[0].to(self.dtype), wanted[1])
        grad = OutputGradient(inputs.grad, None)

        def backward() -> tuple[Tensor, ...]:
            torch.use_deterministic_algorithms(bool(in_order))
            try:
                found = backend.backward(grad, output, latent, inputs.chosen, self.scale)
            finally:
                torch.use_deterministic_algorithms(False)
            return (*output, *whole(found))

        return backward

    def _peer(
        self, name: str, work: str, inputs: Inputs, wanted: tuple[Tensor, ...]
    ) -> Callable[[], tuple[Tensor, ...]]:
        if not self.on_gpu:
            raise Refused("it needs a GPU")
        operands = inputs.query[:, 0], inputs.kv[:, 0], inputs.chosen[:, 0], self.scale
        if name == "FlashMLA":
            attend = flash_mla(*operands)
            return lambda: (attend().unsqueeze(1),)
        if work == "forward":
            forward = tilelang_forward(*operands)
            return lambda: (forward()[0].unsqueeze(1),)
        backward = tilelang_backward(*operands, inputs.grad[:, 0])

        def gradients() -> tuple[Tensor, ...]:
            dq, dkv = backward()
            return (*wanted[:2], dq.unsqueeze(1), dkv)

        return gradients

    def _measure_indexer(self, case: Case) -> Row:
        import torch

        from benchmarks.dsa_indexer import measure_indexer

        make = torch.Generator(self.device).manual_seed(self.args.seed)
        sizes = case.heads, case.kv, self.args.topk
        budget = self.args.seconds_per_row
        found = measure_indexer(case.implementation, *sizes, self.dtype, make, budget)
        more = {
            "flops": found.flops,
            "exact": found.exact,
            "agreement": found.agreement,
            "scores_ms": found.scores * 1e3,
        }
        beside = self._forward_beside(case)
        if beside is not None:
            per_query = beside / self.args.queries
            more["share"] = found.times.median / found.queries / per_query
            bound = found.flops / found.queries / (self._ceilings["matmul_tflops"] * 1e12)
            more["bound"] = bound / per_query
        return Row(case=case, times=found.times, more=more)

    def _forward_beside(self, case: Case) -> float | None:
        """Seconds of the fastest of our sparse forwards of 128 heads over as many keys."""
        heads = 128 if self.on_gpu else case.heads
        found = []
        for name in ("hopper", "triton"):
            one = Case("forward", heads, case.kv, False, name)
            try:
                found.append(self._seconds(one))
            except Refused:
                continue
        return min(found, default=None)

    def _seconds(self, case: Case) -> float:
        from benchmarks.kit.timing import Repeated

        work = Repeated(self._implementation(case, self._inputs(case), ()), on_gpu=self.on_gpu)
        work.once()
        return work.times(work.once(), self.args.seconds_per_row)[0].median


if __name__ == "__main__":
    leave(DSABenchmark.main())
