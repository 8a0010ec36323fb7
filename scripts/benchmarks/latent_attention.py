#!/usr/bin/env python3
"""Measure attention over the latent, beside FlashAttention-3's, whose forward takes it too.

    $ python scripts/benchmarks/latent_attention.py --json docs/kernels/latent.json
    $ python scripts/benchmarks/latent_attention.py --heads 16 --seq-lens 8k --seconds-per-row 0.5

One causal sequence, one key [latent | k_rope] for all heads. Implementations of an input are
repeated in turns:

queued  calls queued one behind the other, the GPU's time of each
called  the host waits for the end of every call; its own part counts, too

FlashAttention-3 (forward only, ``qv``) is vLLM's, as a package or as the library in its wheel, see
``peers/libraries.py``. TFLOP/s count 2 (2 C + R) operations per head and visible pair forward, and
2 (5 C + 3 R) backward. Output:

    3.1 s  forward n=16 S=8192: ours, hopper: queued 650 TFLOP/s, called 610 TFLOP/s

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.core_attention import (
    CoreCase,
    attention_flops,
    build_core,
    pair_widths,
    random_inputs,
)
from benchmarks.kit import arguments, provenance
from benchmarks.kit.arguments import DIMS, dims_of, list_of, one_of, parse_sizes
from benchmarks.kit.plot import Panel, collected
from benchmarks.kit.report import Refused, Report, Times, reason
from benchmarks.kit.run import Benchmark
from benchmarks.peers.libraries import flash_attention_3, require_flash_attention_3
from console.parser import Parser
from console.script import leave

if TYPE_CHECKING:
    from torch import Tensor

_PEER = "FlashAttention-3"
# The same kernels' results to the bit in every run, see torch.use_deterministic_algorithms.
_DETERMINISTIC = "ours, hopper, deterministic"
IMPLEMENTATIONS = {
    "forward": ("ours, hopper", "ours, triton", "ours, reference", _PEER),
    "backward": ("ours, hopper", _DETERMINISTIC, "ours, triton", "ours, reference"),
}
EVERY = tuple(dict.fromkeys(name for names in IMPLEMENTATIONS.values() for name in names))


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        work: ``"forward"`` or ``"backward"``.
        heads: Query heads.
        tokens: Of the sequence.
        implementation: One of :data:`IMPLEMENTATIONS`.
    """

    work: str
    heads: int
    tokens: int
    implementation: str

    def __str__(self) -> str:
        return f"{self.work} n={self.heads} S={self.tokens}: {self.implementation}"

    @property
    def input(self) -> tuple:
        """What cases that are compared have in common."""
        return self.work, self.heads, self.tokens


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case, or why there are no figures of it.

    Attributes:
        case: What was measured.
        times: Of a queued call.
        called: Of a call whose end the host waits for.
        more: ``flops`` of a call, and ``difference`` from our first implementation, relative to the
            largest value.
        error: Empty, or why figures are missing.
    """

    case: Case
    times: Times | None = None
    called: Times | None = None
    more: dict[str, float] = field(default_factory=dict)
    error: str = ""


class LatentReport(Report):
    """One run."""

    row = Row

    def figures(self, row: Row) -> dict[str, float]:
        """Milliseconds and TFLOP/s of both ways to call."""
        assert row.times is not None and row.called is not None
        flops, found = row.more["flops"], {}
        for name, times in (("queued", row.times), ("called", row.called)):
            found[f"{name}_ms"] = round(1e3 * times.median, 4)
            found[f"{name}_tflops"] = flops / times.median / 1e12
        return {**found, "difference": row.more["difference"]}

    @classmethod
    def panels(cls, reports: Sequence[LatentReport]) -> list[Panel]:
        """TFLOP/s of queued calls over the length."""
        points = (
            (
                f"{row.case.work} n={row.case.heads} [TFLOP/s]",
                row.case.implementation,
                row.case.tokens,
                report.figures(row)["queued_tflops"],
            )
            for report in reports
            for row in report.measured
        )
        return collected(points, "tokens")


class LatentBenchmark(Benchmark):
    """All implementations of an input in turns."""

    script = "latent_attention.py"
    report = LatentReport

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        # cuBLAS reads it when it starts; products are deterministic only with it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        arguments.use_device(args.device)
        from benchmarks.kit.processes import Processes

        self.processes = Processes(args.seed)
        self._rows: dict[Case, Row] = {}

    @classmethod
    def add_options(cls, parser: Parser) -> None:
        """See --help."""
        add = parser.add_argument
        arguments.add_common(parser, json=None, plot=None, render=None, only=None, device=None)
        arguments.add_common(
            parser, heads="16,128", seconds_per_row=0.15, time_limit=80.0, seed=1234
        )
        add("--seq-lens", type=parse_sizes, default="8k,16k,32k", help="tokens of the sequence")
        works = tuple(IMPLEMENTATIONS)
        add("--works", type=list_of(one_of(works)), default=",".join(works), help="what to measure")
        whose = "whose, separated by ;"
        kind = list_of(one_of(EVERY), separator=";")
        add("--implementations", type=kind, default=";".join(EVERY), help=whose)
        arguments.add_dims(parser, DIMS)

    def environment(self) -> dict:
        """With the rates that the device reaches."""
        from benchmarks.kit.timing import ceilings

        return provenance.describe(
            self.processes.on_gpu,
            self.processes.dtype,
            dims=dims_of(self.args),
            ceilings=ceilings(self.processes.on_gpu),
        )

    def cases(self) -> list[Case]:
        """Forward first, short sequences first."""
        found = [
            Case(work, heads, tokens, implementation)
            for work in self.args.works
            for heads in self.args.heads
            for tokens in sorted(self.args.seq_lens)
            for implementation in IMPLEMENTATIONS[work]
            if implementation in self.args.implementations
        ]
        return arguments.chosen(found, self.args.only)

    def measure(self, case: Case) -> Row:
        """Measure all implementations of the input with the first of them.

        Raises:
            Refused: With the reason of a case that could not be measured.
        """
        if case not in self._rows:
            self._rows = self._together([one for one in self.cases() if one.input == case.input])
        row = self._rows[case]
        if row.error:
            raise Refused(row.error)
        return row

    def _together(self, cases: Sequence[Case]) -> dict[Case, Row]:
        """Rows of cases with the same input."""
        from benchmarks.kit.timing import Repeated, in_turns, repetitions

        rows, works, outputs = {}, {}, {}
        for case in cases:
            try:
                run = self._call(case)
                outputs[case] = run().detach().float()
            except Exception as error:  # of any kernel; the others are measured all the same
                rows[case] = Row(case=case, error=reason(error))
            else:
                works[case] = Repeated(run, on_gpu=self.processes.on_gpu)
        if not works:
            return rows
        first = next(iter(outputs.values()))
        seconds = sum(work.once() for work in works.values())
        count = repetitions(seconds, self.args.seconds_per_row * len(works))
        queued = in_turns([*works.values()], count)
        called = self._called([*works.values()], count)
        for case, steps, waited in zip(works, queued, called):
            off = float((outputs[case] - first).abs().max() / first.abs().max())
            more = {"flops": self._flops(case), "difference": off}
            times = Times.of([step for _, _, step in steps])
            rows[case] = Row(case=case, times=times, called=Times.of(waited), more=more)
        return rows

    def _called(self, works: Sequence[Any], count: int) -> list[list[float]]:
        """Seconds until the end of every call, which the host waits for; all in turns."""
        seconds: list[list[float]] = [[] for _ in works]
        for turn in range(count):
            for work, found in [*zip(works, seconds)][:: -1 if turn % 2 else 1]:
                self.processes.synchronize()
                begin = time.perf_counter()
                work.forward()
                self.processes.synchronize()
                found.append(time.perf_counter() - begin)
        return seconds

    def _core(self, case: Case) -> CoreCase:
        return CoreCase(case.implementation, "absorbed", case.heads, case.tokens)

    def _flops(self, case: Case) -> float:
        forward, backward = attention_flops(self._core(case), dims_of(self.args))
        return forward if case.work == "forward" else backward

    def _call(self, case: Case) -> Callable[[], Tensor]:
        """What is timed; its result is the output, or the gradient of the latent."""
        core, processes = self._core(case), self.processes
        processes.reseed(self.args.seed)
        if case.implementation == _PEER:
            return self._peer(core)
        name = case.implementation.removesuffix(", deterministic")
        attention = build_core(dataclasses.replace(core, implementation=name), self.args, processes)
        if case.work == "forward":
            return lambda: attention.forward().out
        attended = attention.forward()

        def backward() -> Tensor:
            with deterministic(case.implementation == _DETERMINISTIC):
                return attention.backward(attended).k_content

        return backward

    def _peer(self, core: CoreCase) -> Callable[[], Tensor]:
        import torch

        require_flash_attention_3()
        dims = dims_of(self.args)
        q_content, q_rope, latent, k_rope, _ = random_inputs(core, dims, self.processes)
        bounds = torch.tensor([0, core.tokens], dtype=torch.int32, device=latent.device)
        scale = (dims["qk-head-dim"] + dims["qk-pos-emb-head-dim"]) ** -0.5
        assert pair_widths("absorbed", dims)[1] == latent.shape[-1]
        parts = q_rope[:, 0], k_rope[:, 0, None], latent[:, 0], q_content[:, 0]
        return lambda: flash_attention_3(
            *parts,
            scale,
            cu_seqlens=bounds,
            cu_seqlens_k=bounds,
            max_seqlen=core.tokens,
            num_splits=1,
        )[:, None]


@contextlib.contextmanager
def deterministic(demanded: bool) -> Iterator[None]:
    """Demand deterministic algorithms of PyTorch inside the block, or demand nothing."""
    import torch

    torch.use_deterministic_algorithms(demanded)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


if __name__ == "__main__":
    leave(LatentBenchmark.main())
