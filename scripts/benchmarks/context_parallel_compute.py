#!/usr/bin/env python3
"""Measure what one context-parallel rank computes, ours beside Megatron's, on a single GPU.

    $ python scripts/benchmarks/context_parallel_compute.py --json compute.json
    $ python scripts/benchmarks/context_parallel_compute.py --cp-sizes 4 --layouts thd \
          --works all_gather:flash_attention_4,all_gather:cudnn
    $ python scripts/benchmarks/context_parallel_compute.py --device cpu --heads 2 --seq-lens 64 \
          --hidden-size 64 --q-lora-rank 32 --kv-lora-rank 16 --works all_gather:reference

COMMUNICATION IS NOT IN THESE FIGURES. One process is one rank of the group; what other ranks would
send is a copy, on the device, of what it sends itself, of the same size. Everything else is the
code that runs on many GPUs: our layer with a kind of exchange and a backend (--works), and
Megatron's with TransformerEngine's ring. The dimensions are DeepSeek-V3's, nothing is recomputed,
"thd" is a pack of five documents of 5, 1, 4, 2 and 4 sixteenths. The first rank is measured: with
the first and the last chunk of every sequence it needs the keys of all tokens.

All works of a case run in turns; figures are medians. Times are the GPU's, which is kept busy while
the host queues a turn; "host" is what the host takes to queue a step on an idle GPU; "messages" is
the time of copies of as many bytes. "ratio" is the step's time without messages divided by
Megatron's, or the host's time where that is longer. "difference" is of outputs and gradients of
weights, from those of the first work. Written after every case:

    12.3 s  cp=4 sbhd S=16384 n=128: all_gather:cudnn 30.1 ms (0.95), megatron 31.7 ms

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from absorbed_mla.options import CORE_ATTENTION_BACKENDS, CP_COMM_TYPES
from benchmarks.kit import arguments, provenance
from benchmarks.kit.arguments import DIMS, dims_of, list_of, one_of, parse_sizes
from benchmarks.kit.report import Report
from benchmarks.kit.run import Benchmark
from benchmarks.kit.tables import markdown_table
from benchmarks.together import Measured, Work, measure_together
from console.parser import Parser
from console.script import leave

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.kit.simulated_rank import SimulatedRank

LAYOUTS = ("sbhd", "thd")
WORKS = tuple(map(":".join, product(CP_COMM_TYPES, CORE_ATTENTION_BACKENDS)))
DEFAULT = ("all_gather:cudnn", "all_gather:transformer_engine", "p2p:cudnn")
MEGATRON = "megatron"
# Of a pack: documents by their sixteenths.
_SIXTEENTHS = (5, 1, 4, 2, 4)
_TIMES = ("forward ms", "backward ms", "step ms", "host ms", "messages ms")
_HEAD = ("case", "work", *_TIMES, "messages MiB", "difference", "ratio")


@dataclass(frozen=True)
class Case:
    """One rank's part of one input.

    Attributes:
        cp_size: Ranks.
        layout: ``"sbhd"``, or ``"thd"``: a pack of five documents.
        tokens: Of the whole sequence or pack.
        heads: Of the layer.
    """

    cp_size: int
    layout: str
    tokens: int
    heads: int

    def __str__(self) -> str:
        return f"cp={self.cp_size} {self.layout} S={self.tokens} n={self.heads}"

    @property
    def lengths(self) -> list[int]:
        """Tokens of every document."""
        if self.layout == "sbhd":
            return [self.tokens]
        return [self.tokens // 16 * share for share in _SIXTEENTHS]


def cases(args: argparse.Namespace) -> list[Case]:
    """Shorter and narrower ones first.

    Raises:
        ValueError: If a sequence does not divide.
    """
    ways = product(sorted(args.seq_lens), args.heads, args.cp_sizes, args.layouts)
    found = [Case(cp, layout, tokens, heads) for tokens, heads, cp, layout in ways]
    for case in found:
        chunks = 2 * case.cp_size * (16 if case.layout == "thd" else 1)
        if case.tokens % chunks:
            raise ValueError(
                f"--seq-lens must be multiples of {chunks} for {case.layout} on {case.cp_size} "
                f"ranks; got {case.tokens}"
            )
    return arguments.chosen(found, args.only)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case with its works, or with the error that prevented all of them.

    Attributes:
        case: What was measured.
        works: Ours and Megatron's.
        messages: By work, bytes of other ranks' messages in a step, and seconds of such copies.
        error: Empty, or why nothing was measured.
    """

    case: Case
    works: list[Measured] = field(default_factory=list)
    messages: dict[str, tuple[int, float]] = field(default_factory=dict)
    error: str = ""

    def ratio(self, work: Measured) -> float | None:
        """Time of a step divided by Megatron's."""
        theirs = [x for x in self.works if x.name == MEGATRON and not x.error]
        return self.seconds(work) / self.seconds(theirs[0]) if theirs else None

    def seconds(self, work: Measured) -> float:
        """Of a step without messages; where the host takes longer, the GPU waits for it."""
        assert work.step is not None and work.host is not None
        _, copies = self.messages[work.name]
        return max(work.step.median - copies, work.host.median)


class ComputeReport(Report):
    """One run."""

    row = Row

    def figures(self, row: Row) -> dict[str, float]:
        """Times and ratios of all works, by work and name."""
        found: dict[str, float] = {}
        for work in row.works:
            if work.error:
                continue
            for name in ("forward", "backward", "step", "host"):
                found[f"{work.name} {name}_ms"] = 1e3 * getattr(work, name).median
            num_bytes, copies = row.messages[work.name]
            found |= {f"{work.name} messages_ms": 1e3 * copies}
            found |= {f"{work.name} messages_mib": num_bytes / 2**20}
            if work.difference is not None:
                found[f"{work.name} difference"] = work.difference
            ratio = row.ratio(work)
            if ratio is not None and work.name != MEGATRON:
                found[f"{work.name} ratio"] = ratio
        return found

    def line(self, row: Row) -> str:
        """A row in one line: the steps of its works."""
        if row.error:
            return super().line(row)
        parts = []
        for work in row.works:
            if work.error:
                parts.append(f"{work.name}: {work.error[:100]}")
                continue
            ratio = row.ratio(work)
            compared = f" ({ratio:.2f})" if ratio and work.name != MEGATRON else ""
            parts.append(f"{work.name} {1e3 * row.seconds(work):.1f} ms{compared}")
        return f"{row.case}: {', '.join(parts)}"

    @classmethod
    def notes(cls, reports: Sequence[ComputeReport]) -> list[str]:
        """A table of all works."""
        lines = [
            [str(row.case), work.name, *_cells(row, work)]
            for report in reports
            for row in report.measured
            for work in row.works
            if not work.error
        ]
        return [markdown_table(_HEAD, lines, ("case", "work")) if lines else ""]


def _cells(row: Row, work: Measured) -> list[str]:
    times = (work.forward, work.backward, work.step, work.host)
    ratio = row.ratio(work)
    num_bytes, copies = row.messages[work.name]
    return [
        *(f"{1e3 * one.median:.2f}" for one in times if one is not None),
        f"{1e3 * copies:.2f}",
        f"{num_bytes / 2**20:.0f}",
        "" if work.difference is None else f"{work.difference:.1e}",
        "" if ratio is None else f"{ratio:.2f}",
    ]


def _copy_seconds(num_bytes: int, processes: SimulatedRank) -> float:
    """Of copies of so many bytes on the device, at the rate of large ones."""
    import torch

    from benchmarks.kit.timing import Repeated

    size = min(num_bytes, 2**28)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=processes.device) for _ in "ab")
    copy = Repeated(lambda: target.copy_(source), on_gpu=processes.on_gpu)
    copy.once()
    return min(forward for forward, _, _ in copy.steps(5)) * num_bytes / size


class ComputeBenchmark(Benchmark):
    """Works of the same rank in turns."""

    script = "context_parallel_compute.py"
    report = ComputeReport

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._cases = cases(args)
        arguments.use_device(args.device)

    @classmethod
    def add_options(cls, parser: Parser) -> None:
        """See --help."""
        add = parser.add_argument
        arguments.add_common(parser, render=None, json=None, only=None, device=None, seed=1234)
        arguments.add_common(parser, heads="16,128", seconds_per_row=0.5, time_limit=55.0)
        sizes = "tokens of a whole sequence or pack, k is 1024"
        add("--seq-lens", type=parse_sizes, default="16k,32k", help=sizes)
        add("--cp-sizes", type=parse_sizes, default="4,2", help="context-parallel ranks")
        add("--layouts", type=list_of(one_of(LAYOUTS)), default=",".join(LAYOUTS), help="inputs")
        text = "how ours exchanges latents and attends, beside Megatron's: exchange:backend, ..."
        add("--works", type=list_of(one_of(WORKS)), default=",".join(DEFAULT), help=text)
        arguments.add_dims(parser, DIMS)

    def environment(self) -> dict:
        """With what is not measured."""
        import torch

        on_gpu = torch.cuda.is_available()
        return provenance.describe(
            on_gpu,
            torch.bfloat16 if on_gpu else torch.float32,
            dims=dims_of(self.args),
            communication="none: messages of other ranks are copies on the device",
        )

    def cases(self) -> list[Case]:
        """Shorter and narrower ones first."""
        return self._cases

    def measure(self, case: Case) -> Row:
        """The works of a case."""
        from benchmarks.kit.simulated_rank import SimulatedRank, exchange_by_copies

        processes = SimulatedRank(self.args.seed, 0, case.cp_size)
        try:
            with exchange_by_copies() as received:
                works = [
                    Work.attempt(name, lambda name=name: self._work(case, name, processes))
                    for name in (*self.args.works, MEGATRON)
                ]
                found = measure_together(works, processes, self.args.seconds_per_row)
                messages = {}
                for work, one in zip(works, found):
                    if not one.error:
                        received.num_bytes = 0
                        work.backward(work.forward())
                        work.finish()
                        copies = _copy_seconds(received.num_bytes, processes)
                        messages[work.name] = (received.num_bytes, copies)
        finally:
            processes.leave()
        return Row(case=case, works=found, messages=messages)

    def _work(self, case: Case, name: str, processes: SimulatedRank) -> Work:
        from absorbed_mla import AbsorbedMLAOptions
        from benchmarks.kit import layers

        exchange, _, backend = name.partition(":")
        options = None
        if name != MEGATRON:
            options = AbsorbedMLAOptions(form="expanded", core_attention_backend=backend)
        config = layers.layer_config(
            self.args,
            processes,
            heads=case.heads,
            recompute=None,
            cp_comm_type="p2p" if name == MEGATRON else exchange,
        )
        packed = None
        if case.layout == "thd":
            packed = layers.pack(case.lengths, processes.device)
            # The same: TransformerEngine reads them under context parallelism.
            packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = packed.cu_seqlens_q
        tokens = case.tokens // case.cp_size
        processes.begin_again()
        subject = layers.build(config, options, processes, tokens, packed)

        def outputs(output: Tensor) -> list[Tensor]:
            """And gradients that do not depend on what other ranks would have sent back."""
            subject.backward(subject.forward())
            layer = subject.layer
            linear = (layer.linear_q_up_proj, layer.linear_k_up_proj, layer.linear_v_up_proj)
            gradients = [one.weight.grad for one in linear]
            subject.forget_gradients()
            return [output, *gradients]

        return Work(
            name,
            subject.forward,
            subject.backward,
            None if name == MEGATRON else outputs,
            subject.forget_gradients,
        )


if __name__ == "__main__":
    leave(ComputeBenchmark.main())
