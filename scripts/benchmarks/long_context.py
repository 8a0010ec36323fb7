#!/usr/bin/env python3
"""Measure what one rank of context parallelism computes at long contexts, without the exchange.

    $ python scripts/benchmarks/long_context.py --json long.json --plot long.png
    $ python scripts/benchmarks/long_context.py --sizes 1m --cp 8 --only dsa

One process is rank cp / 2: our attention layer with the projections, forward and backward, on that
rank's tokens and the latents of all tokens, which are made here (``kit/simulated_rank.py``). All
ranks have equal work. "dsa" is sparse attention with the indexer's loss over the chosen keys,
"dsa_fp8" the same with scores in FP8, which must be named; all other settings are what ``auto``
takes. Figures are milliseconds of one step:

    step      forward and backward: select + loss + attention_forward + attention_backward + other
    select    the indexer's scores of all keys that the queries see, and the choice
    loss      the indexer's, with its gradient
    other     projections, rotation, up-projections, merging
    exposed   model: what of the exchange the step would wait for
    total     step + exposed
    exchange  model: all messages without any overlap

Where memory does not hold the rank's work, its tokens are computed in "parts": rank r of cp holds
the tokens of ranks r * parts, r * parts + 1, ... of cp * parts, which are measured one by one and
added up. No row is extrapolated. A dense row whose estimate exceeds --longest is not measured.

The model divides the bytes that a rank receives, as the code sends them, by --nvlink up to
--gpus-per-host ranks and by --infiniband beyond, one message after the other. A message is exposed
as far as it lasts longer than what the measured step computes between its begin and its end.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit
from benchmarks.kit.arguments import seconds
from console.parser import Parser

if TYPE_CHECKING:
    from benchmarks.kit.layers import Subject
    from benchmarks.kit.simulated_rank import Interval, SimulatedGroup

torch: Any = kit.lazy("torch")
WORKS = ("dsa", "dsa_fp8", "dense")
# Measured first, by work, tokens and ranks; the others follow, short ones first.
FIRST = (
    *(("dsa", 2**20, 8), ("dsa_fp8", 2**20, 8), ("dense", 2**17, 8), ("dense", 2**20, 64)),
    *(("dsa", 2**20, 64), ("dsa_fp8", 2**20, 64), ("dsa", 2**17, 8), ("dsa", 2**19, 8)),
    *(("dense", 2**19, 64), ("dense", 2**17, 64), ("dsa", 2**20, 16), ("dense", 2**19, 16)),
)
# After the first, steps of fewer seconds are repeated thrice, and once.
SHORT, LONG = 1.0, 6.0
MOST_PARTS = 16
# Of a row's figures, in the output.
SHOWN = ("step_ms", "select_ms", "exposed_ms", "exchange_ms", "parts", "peak_gib", "settings")


@dataclass(frozen=True)
class LongCase(kit.Case):
    """One rank's step."""

    text = "S={0.tokens} CP={0.cp} n={0.heads} {0.work}"
    work: str  # one of WORKS
    heads: int  # of the attention
    tokens: int  # of the whole sequence
    cp: int  # ranks

    def place(self, number: int = 0, parts: int = 1) -> tuple[int, int]:
        """Ranks of the group, and which of them holds one of ``parts`` parts of our rank."""
        return self.cp * parts, self.cp // 2 * parts + number

    @property
    def plotted_as(self) -> str:
        """See ``kit.Case``."""
        return f"CP {self.cp}"


class LongReport(kit.Report):
    """One run."""

    row, case = kit.TimedRow, LongCase
    plotted = (
        ("{0.work} n={0.heads} [ms of a rank's step]", "step_ms", "tokens"),
        ("{0.work} n={0.heads} [ms of the exchange, not overlapped]", "exposed_ms", "tokens"),
    )

    def line(self, row: kit.TimedRow) -> str:
        """In short, also what is known of a row that was not measured."""
        shown = (f"{name} {row.more[name]}" for name in SHOWN if name in row.more)
        return f"{row.case}: " + ", ".join([*filter(None, [row.error[:150]]), *shown])


class LongContextBenchmark(kit.Benchmark):
    """Each case by itself."""

    report = LongReport
    options = kit.declare(
        "json plot render only device heads=128 time_limit=130 seed=1234",
        sizes=kit.sizes("tokens of the sequence", "128k,512k,1m"),
        cp=kit.sizes("context-parallel ranks", "8,16,64"),
        works=kit.some("kinds of attention", WORKS),
        topk=kit.number("keys that a query attends to", 2048),
        indexer_heads=kit.number("heads of the indexer", 64),
        indexer_dim=kit.number("width of one of them", 128),
        longest=kit.Option("most seconds that a dense step may be estimated to take", seconds, 12),
        nvlink=kit.number("GB/s that a rank receives within a host", 400),
        infiniband=kit.number("GB/s that a rank receives between hosts", 50),
        gpus_per_host=kit.number("ranks that NVLink connects", 8),
        dims=kit.DIMS,
    )
    quick = "--sizes 64 --cp 2 --topk 8 --indexer-heads 2 --indexer-dim 32"
    recorded = (
        *("topk", "indexer_heads", "indexer_dim", "nvlink", "infiniband", "gpus_per_host", "dims"),
    )

    @classmethod
    def check(cls, parser: Parser, args: argparse.Namespace) -> None:
        """Chunks are whole, and there are keys to choose from."""
        for tokens, cp in product(args.sizes, args.cp):
            if cp < 2 or tokens % (2 * cp) or tokens <= args.topk:
                parser.error(
                    "--sizes must be more than --topk and divide into 2 --cp chunks, at least 2 of "
                    f"--cp: got {tokens}, {args.topk} and {cp}"
                )

    def prepare(self) -> None:
        """One process."""
        super().prepare()
        from benchmarks.kit.simulated_rank import Timeline

        self.on_gpu, self.dtype = self.processes.on_gpu, self.processes.dtype
        self.timeline = Timeline(self.on_gpu)
        self.case: LongCase | None = None  # at hand
        self.more: dict[str, Any] = {}  # its figures
        self.parts: dict[tuple[int, int], int] = {}  # by a rank's tokens and heads
        self.compiled: set[str] = set()  # settings that have run

    def cases(self) -> list[LongCase]:
        """In the order of ``FIRST``."""
        args = self.args

        def place(case: LongCase) -> tuple[int, float]:
            one = case.work, case.tokens, case.cp
            return FIRST.index(one) if one in FIRST else len(FIRST), case.tokens**2 / case.cp

        ways = product(args.works, args.heads, args.sizes, args.cp)
        return sorted((LongCase(*way) for way in ways), key=place)

    def rows(self) -> Any:
        """In the place of a rank."""
        from benchmarks.kit.simulated_rank import simulated_exchange

        with simulated_exchange(self.timeline):
            yield from super().rows()

    def failed(self, case: LongCase, error: Exception) -> kit.TimedRow:
        """With the settings and the exchange, which are known all the same once it has begun."""
        return replace(super().failed(case, error), more=self.more if case == self.case else {})

    def measure(self, case: LongCase) -> kit.TimedRow:
        """One rank's step, in as few parts as memory allows."""
        from benchmarks.kit.simulated_rank import exposed_seconds

        self.case, self.more = case, {}
        self._settle(case)
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        key = case.tokens // case.cp, case.heads
        while True:
            parts = self.parts.setdefault(key, 1)
            try:
                found = [self._part(case, number, parts) for number in range(parts)]
                break
            except torch.OutOfMemoryError:
                # What auto takes for dense attention depends on the number of ranks.
                if case.work == "dense" or parts == MOST_PARTS:
                    raise
            self.parts[key] = 2 * parts
            self.clean()
        pieces, messages, steps = zip(*found)
        total = sum(pieces, Counter())
        total["other"] = 2 * total["step"] + total["forward"] + total["backward"] - total.total()
        # Parts have the same messages, and what lies between them adds up.
        intervals = []
        for same in zip(*messages, strict=True):
            sizes, begun, waited = zip(*same)
            intervals.append((sizes[0], sum(begun), sum(waited)))
        total["exposed"] = exposed_seconds(intervals, self._bandwidth(case))
        total["total"] = total["step"] + total["exposed"]
        self.more |= {f"{name}_ms": round(1e3 * one, 2) for name, one in total.items()}
        self.more |= {"parts": parts, "repetitions": len(steps[0])}
        if self.on_gpu:
            self.more["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        times = kit.Times.of([sum(each) for each in zip(*steps)])
        return kit.TimedRow(case=case, times=times, more=self.more)

    def _settle(self, case: LongCase) -> None:
        """Note the settings that the layer takes, and its exchange.

        Raises:
            kit.Refused: If the step would take too long.
        """
        from absorbed_mla.core_attention import cost
        from absorbed_mla.dsa.backend_selector import SparseBackendSelector
        from absorbed_mla.registry import INDEXER_BACKENDS, SPARSE_BACKENDS
        from absorbed_mla.sequences import SequenceLayout

        subject, group = self._rank(case)
        layer, x, layout = subject.layer, subject.x, SequenceLayout.dense(case.tokens)
        keys = layer.context_parallel.keys(
            group, layout, 1, self.dtype, causal=True, recomputed=False
        )
        plan = layer.core_attention.plan(keys, layout, case.cp, x, None)
        form, backend = type(plan.form).__name__.removesuffix("Form").lower(), plan.backend.name
        dsa = getattr(layer.core_attention, "dsa", None)
        if dsa is not None:
            selector = SparseBackendSelector(layer.options, layer.dims, dsa)
            chosen = [
                selector.get(registry, selector.request(x)).name
                for registry in (SPARSE_BACKENDS, INDEXER_BACKENDS)
            ]
            backend = ", indexer ".join(chosen)
        kept = " kept" if keys.kept else ""
        self.more["settings"] = f"{form} {backend}, {keys.name}{kept}"
        self._exchange(case, keys, x, layer.dims.kv_down_dim, dsa.head_dim if dsa else 0)
        if dsa is None:
            work = cost.Work.of(layout, 1, case.cp, causal=True, training=True)
            where = cost.machine_name(x.device)
            estimate = cost.seconds(form, plan.backend, layer.dims, work, where)
            left = self.args.time_limit - (time.monotonic() - self.args.begin)
            if estimate > min(self.args.longest, left):
                raise kit.Refused(f"not measured: would take {estimate:.0f} s")

    def _exchange(self, case: LongCase, keys: Any, x: Any, width: int, index_width: int) -> None:
        """Note what a step of the rank receives: its messages without any computing."""
        like = {"device": x.device, "dtype": self.dtype}
        kv, index = (torch.zeros(len(x), 1, n, **like) for n in (width, index_width))
        self.timeline.begin()
        keys.begin(kv)
        gathered = keys.gather(index.requires_grad_()) if index_width else None
        for _ in keys.blocks(kv, keep=True):
            pass
        ways = len(self.timeline.messages)
        keys.gradient(kv, lambda block: torch.zeros_like(block.kv, dtype=torch.float32))
        keys.finish_gradient()
        if gathered is not None:
            gathered.backward(gathered)
        received = [message.num_bytes for message in self.timeline.messages]
        self.more |= {
            "forward_bytes": sum(received[:ways]),
            "backward_bytes": sum(received[ways:]),
            "exchange_ms": round(1e3 * sum(received) / self._bandwidth(case), 2),
        }

    def _bandwidth(self, case: LongCase) -> float:
        """Bytes per second."""
        args = self.args
        return 1e9 * (args.nvlink if case.cp <= args.gpus_per_host else args.infiniband)

    def _rank(
        self, case: LongCase, number: int = 0, parts: int = 1
    ) -> tuple[Subject, SimulatedGroup]:
        """A layer with the input of one part of the rank, in a group of its own."""
        from absorbed_mla import AbsorbedMLAOptions
        from absorbed_mla.context_parallel.strategy import ContextParallel
        from benchmarks.kit import layers
        from benchmarks.kit.simulated_rank import SimulatedGroup

        args, options, fields = self.args, AbsorbedMLAOptions(), {}
        if case.work != "dense":
            fields = {
                "experimental_attention_variant": "dsa",
                "dsa_indexer_n_heads": args.indexer_heads,
                "dsa_indexer_head_dim": args.indexer_dim,
                "dsa_indexer_topk": args.topk,
                "dsa_indexer_loss_coeff": 1.0,
                "dsa_indexer_use_sparse_loss": True,
                "dsa_kernel_backend": "none",
            }
        if case.work == "dsa_fp8":
            fp8 = "triton_fp8" if self.on_gpu else "reference_fp8"
            options = options.replace(indexer_backend=fp8)
        config = layers.layer_config(
            args, self.processes, heads=case.heads, recompute=None, **fields
        )
        size, rank = case.place(number, parts)
        subject = layers.build(config, options, self.processes, case.tokens // size, None)
        group = SimulatedGroup(rank, size, self.timeline, case.cp)
        layer = subject.layer
        comm_type = layer.context_parallel.cp_comm_type
        layer.context_parallel = ContextParallel(group, comm_type, layer.dims)
        return subject, group

    def _part(
        self, case: LongCase, number: int, parts: int
    ) -> tuple[Counter[str], list[Interval], list[float]]:
        """Of the step of median time, seconds by name and messages; seconds of all steps."""
        from benchmarks.kit.timing import Repeated

        subject, _ = self._rank(case, number, parts)

        def forward() -> Any:
            self.timeline.begin()
            return subject.forward()

        work = Repeated(forward, subject.backward, subject.forget_gradients, on_gpu=self.on_gpu)

        def once() -> tuple[Counter[str], list[Interval]]:
            [found] = work.steps(1)
            phases = Counter(dict(zip(("forward", "backward", "step"), found)))
            return phases + self.timeline.seconds(), self.timeline.intervals()

        steps = [once()]
        first, settings = steps[0][0]["step"], self.more["settings"]
        if first < LONG or settings not in self.compiled:
            steps = [once() for _ in range(3 if first < SHORT else 1)]
        self.compiled.add(settings)
        steps.sort(key=lambda step: step[0]["step"])
        return *steps[len(steps) // 2], [found["step"] for found, _ in steps]


if __name__ == "__main__":
    kit.main(LongContextBenchmark)
