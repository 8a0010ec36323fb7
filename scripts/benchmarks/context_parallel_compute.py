#!/usr/bin/env python3
"""Measure what one context-parallel rank computes, ours beside Megatron's, on a single GPU.

    $ python scripts/benchmarks/context_parallel_compute.py --json compute.json
    $ python scripts/benchmarks/context_parallel_compute.py --cp-sizes 4 --layouts thd \
          --works all_gather:flash_attention_4,all_gather:cudnn

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
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absorbed_mla.options import CORE_ATTENTION_BACKENDS, CP_COMM_TYPES
from benchmarks import kit
from benchmarks.kit.works import Measured, Work, WorksReport, WorksRow, attempts, measure_together

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.kit.simulated_rank import SimulatedRank

torch: Any = kit.lazy("torch")
LAYOUTS = ("sbhd", "thd")
WORKS = tuple(map(":".join, product(CP_COMM_TYPES, CORE_ATTENTION_BACKENDS)))
DEFAULT = "all_gather:cudnn,all_gather:transformer_engine,p2p:cudnn"
MEGATRON = "megatron"
# Of a pack: documents by their sixteenths.
_SIXTEENTHS = (5, 1, 4, 2, 4)
_TIMES = ("forward", "backward", "step", "host")
_HEAD = ("case", "work", *(f"{name} ms" for name in (*_TIMES, "messages")))
_HEAD += ("messages MiB", "difference", "ratio")


@dataclass(frozen=True)
class RankCase(kit.Case):
    """One rank's part of one input."""

    text = "cp={cp_size} {layout} S={tokens} n={heads}"
    cp_size: int  # ranks
    layout: str  # "sbhd", or "thd": a pack of five documents
    tokens: int  # of the whole sequence or pack
    heads: int

    @property
    def lengths(self) -> list[int]:
        """Tokens of every document."""
        if self.layout == "sbhd":
            return [self.tokens]
        return [self.tokens // 16 * share for share in _SIXTEENTHS]


@dataclass(frozen=True, kw_only=True)
class Row(WorksRow):
    """One case with its works."""

    case: RankCase
    # By work, bytes of other ranks' messages in a step, and seconds of such copies.
    messages: dict[str, tuple[int, float]] = field(default_factory=dict)

    def ratio(self, work: Measured) -> float | None:
        """Time of a step divided by Megatron's; None without it, and for itself."""
        theirs = [x for x in self.works if x.name == MEGATRON and not x.error]
        return self.seconds(work) / self.seconds(theirs[0]) if theirs else None

    def seconds(self, work: Measured) -> float:
        """Of a step without messages; where the host takes longer, the GPU waits for it."""
        assert work.step is not None and work.host is not None
        _, copies = self.messages[work.name]
        return max(work.step.median - copies, work.host.median)

    def figures(self, work: Measured) -> dict[str, float]:
        """Of a work that was measured."""
        num_bytes, copies = self.messages[work.name]
        found = {f"{name}_ms": 1e3 * getattr(work, name).median for name in _TIMES}
        found |= {"messages_ms": 1e3 * copies, "messages_mib": num_bytes / 2**20}
        ratio = None if work.name == MEGATRON else self.ratio(work)
        more = {"difference": work.difference, "ratio": ratio}
        return found | {name: value for name, value in more.items() if value is not None}


class ComputeReport(WorksReport):
    """One run."""

    row = Row

    def figures(self, row: Row) -> dict[str, float]:
        """Times and ratios of all works, by work and name."""
        works = [work for work in row.works if not work.error]
        return {f"{w.name} {k}": value for w in works for k, value in row.figures(w).items()}

    def line(self, row: Row) -> str:
        """A row in one line: the steps of its works."""
        if row.error:
            return super().line(row)
        parts = []
        for work in row.works:
            if work.error:
                parts.append(f"{work.name}: {work.error[:100]}")
                continue
            ratio = row.figures(work).get("ratio")
            compared = f" ({ratio:.2f})" if ratio else ""
            parts.append(f"{work.name} {1e3 * row.seconds(work):.1f} ms{compared}")
        return f"{row.case}: {', '.join(parts)}"

    @classmethod
    def notes(cls, reports: Sequence[ComputeReport]) -> list[str]:
        """A table of all works."""
        forms = (*["{:.2f}"] * 5, "{:.0f}", "{:.1e}", "{:.2f}")
        names = (*(f"{name}_ms" for name in _TIMES), "messages_ms", "messages_mib")
        lines = []
        for row in (row for report in reports for row in report.measured):
            for work in (work for work in row.works if not work.error):
                found = {"ratio": row.ratio(work)} | row.figures(work)
                cells = (found.get(name) for name in (*names, "difference", "ratio"))
                texts = ["" if x is None else form.format(x) for form, x in zip(forms, cells)]
                lines.append([str(row.case), work.name, *texts])
        return [kit.markdown_table(_HEAD, lines, ("case", "work")) if lines else ""]


class ComputeBenchmark(kit.Benchmark):
    """Works of the same rank in turns."""

    report = ComputeReport
    options = kit.declare(
        "json render only device heads=16,128 seconds_per_row=0.5 time_limit=55 seed=1234",
        seq_lens=kit.sizes("tokens of a whole sequence or pack, k is 1024", "16k,32k"),
        cp_sizes=kit.sizes("context-parallel ranks", "4,2"),
        layouts=kit.some("inputs", LAYOUTS),
        works=kit.some(
            "how ours exchanges latents and attends, beside Megatron's: exchange:backend, ...",
            WORKS,
            DEFAULT,
        ),
        dims=kit.DIMS,
    )
    quick = "--seq-lens 64 --cp-sizes 2 --works all_gather:reference,p2p:reference,p2p:cudnn"

    def prepare(self) -> None:
        """Refuse what does not divide; every case has processes of its own."""
        self.cases()

    def environment(self) -> dict:
        """With what is not measured."""
        on_gpu = torch.cuda.is_available()
        return kit.provenance.describe(
            on_gpu,
            torch.bfloat16 if on_gpu else torch.float32,
            dims=self._value("dims"),
            communication="none: messages of other ranks are copies on the device",
        )

    def cases(self) -> list[RankCase]:
        """Shorter and narrower ones first.

        Raises:
            ValueError: If a sequence does not divide.
        """
        args = self.args
        ways = product(sorted(args.seq_lens), args.heads, args.cp_sizes, args.layouts)
        found = [RankCase(cp, layout, tokens, heads) for tokens, heads, cp, layout in ways]
        for case in found:
            chunks = 2 * case.cp_size * (16 if case.layout == "thd" else 1)
            if case.tokens % chunks:
                raise ValueError(
                    f"--seq-lens must be multiples of {chunks} for {case.layout} on "
                    f"{case.cp_size} ranks; got {case.tokens}"
                )
        return found

    def measure(self, case: RankCase) -> Row:
        """The works of a case."""
        from benchmarks.kit.simulated_rank import SimulatedRank, exchange_by_copies

        rank = SimulatedRank(self.args.seed, 0, case.cp_size)
        try:
            with exchange_by_copies() as received:
                names = (*self.args.works, MEGATRON)
                works = attempts({name: partial(self._work, case, name, rank) for name in names})
                found = measure_together(works, rank, self.args.seconds_per_row)
                messages = {}
                for work, one in zip(works, found):
                    if not one.error:
                        received.num_bytes = 0
                        work.backward(work.forward())
                        work.finish()
                        copies = _copy_seconds(received.num_bytes, rank)
                        messages[work.name] = (received.num_bytes, copies)
        finally:
            rank.leave()
        return Row(case=case, works=found, messages=messages)

    def _work(self, case: RankCase, name: str, rank: SimulatedRank) -> Work:
        from absorbed_mla import AbsorbedMLAOptions
        from benchmarks.kit import layers

        exchange, _, backend = name.partition(":")
        options = None
        if name != MEGATRON:
            options = AbsorbedMLAOptions(form="expanded", core_attention_backend=backend)
        comm_type = "p2p" if name == MEGATRON else exchange
        config = layers.layer_config(
            self.args, rank, heads=case.heads, recompute=None, cp_comm_type=comm_type
        )
        packed = None
        if case.layout == "thd":
            packed = layers.pack_for_ranks(case.lengths, rank.device)
        rank.begin_again()
        subject = layers.build(config, options, rank, case.tokens // case.cp_size, packed)

        def outputs(output: Tensor) -> list[Tensor]:
            """And gradients that do not depend on what other ranks would have sent back."""
            subject.backward(subject.forward())
            layer = subject.layer
            linear = (layer.linear_q_up_proj, layer.linear_k_up_proj, layer.linear_v_up_proj)
            gradients = [one.weight.grad for one in linear]
            subject.forget_gradients()
            return [output, *gradients]

        compared = None if name == MEGATRON else outputs
        return Work(subject.forward, subject.backward, compared, subject.forget_gradients)


def _copy_seconds(num_bytes: int, rank: SimulatedRank) -> float:
    """Of copies of so many bytes on the device, at the rate of large ones."""
    from benchmarks.kit.timing import Repeated

    size = min(num_bytes, 2**28)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=rank.device) for _ in "ab")
    copy = Repeated(lambda: target.copy_(source), on_gpu=rank.on_gpu)
    copy.once()
    return min(forward for forward, _, _ in copy.steps(5)) * num_bytes / size


if __name__ == "__main__":
    kit.main(ComputeBenchmark)
