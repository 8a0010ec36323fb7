#!/usr/bin/env python3
"""Measure one attention layer under context parallelism, ours beside Megatron's own.

    $ torchrun --nproc-per-node 2 scripts/benchmarks/context_parallel.py RESULTS
    $ python scripts/benchmarks/context_parallel.py /tmp/both --render two.json four.json

All processes are one context-parallel group. For every sequence length, number of heads and layout
it measures step time (of the slowest rank, from when all ranks begin), memory and the bytes that
each rank sends. Bytes per token are for each of a rank's tokens and each other rank: with S tokens
on n ranks, sent / (S / n * (n - 1)). Each row is compared with Megatron's layer on the same input
with the same recomputation. The dimensions are DeepSeek-V3's; GPUs compute in bfloat16, CPUs in
float32. Only if one rank alone fails in the middle of a step, the run ends after 120 s. Output:

    9.1 s  ours p2p expanded sbhd S=16384 n=128 (expanded, cudnn): forward_ms 11.2, step_ms 34.1
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absorbed_mla.options import CP_COMM_TYPES
from benchmarks import kit
from benchmarks.kit.tables import gibibytes
from console.ranks import world_size

if TYPE_CHECKING:
    from benchmarks.kit.layers import Subject

torch: Any = kit.lazy("torch")
LAYOUTS = ("sbhd", "thd")
RECOMPUTE = ("none", "mla_up_proj")
# What TransformerEngine 2.12 accepts for multi-head latent attention.
MEGATRON_COMM_TYPE = "p2p"
_PANEL = "{1.cp_size} ranks, {0.layout}, {0.heads} heads"


@dataclass(frozen=True)
class RingCase(kit.Case):
    """One layer and one input."""

    text = (
        "{0.implementation} {0.cp_comm_type} {0.form}{0.again} {0.layout} S={0.tokens} n={0.heads}"
    )
    implementation: str  # "ours" or "megatron"
    cp_comm_type: str  # as in Megatron's config
    form: str  # of ours; "expanded" for Megatron's own, which has no other
    tokens: int  # of the whole sequence or pack
    heads: int  # of the layer
    layout: str  # "sbhd", or "thd": a pack of equal documents
    documents: int  # in the pack; 1 for sbhd
    recompute: str  # module that is recomputed in backward, or "none"

    @property
    def again(self) -> str:
        """For the name."""
        return "" if self.recompute == "none" else f" recompute {self.recompute}"

    @property
    def plotted_as(self) -> str:
        """With what both layers recompute."""
        return f"{self.implementation}, {self.cp_comm_type}, {self.form}{self.again}"


@dataclass(frozen=True, kw_only=True)
class Row(kit.Row):
    """One case, with its figures or with the error that prevented them.

    Times and bytes are the largest over the ranks; those of a repetition over the same repetition.
    """

    cp_size: int  # ranks
    forward_seconds: Sequence[float] = ()  # every timed forward
    step_seconds: Sequence[float] = ()  # every timed forward and backward
    kept_bytes: int | None = None  # allocated by forward until backward; None without a GPU
    # The most allocated in a step beyond weights, input and output gradient; None without a GPU.
    peak_bytes: int | None = None
    # By a rank. Of collectives as in a ring of n ranks: an all-gather of x sends (n - 1) x, a
    # reduce-scatter of n x as much, an all-reduce of x 2 (n - 1) / n x.
    forward_sent_bytes: int = 0
    backward_sent_bytes: int = 0  # by a rank, counted likewise
    # Of "forward" and "backward", rank 0's calls by operation, group size and dtype.
    traffic: dict[str, list[dict]] | None = None
    ran: str = ""  # form and backend that a layer of ours took; empty if that was not recorded

    @property
    def compared(self) -> tuple:
        """Ranks, input and recomputation."""
        case = self.case
        inputs = (case.layout, case.documents, case.tokens, case.heads)
        return self.cp_size, *inputs, case.recompute

    @property
    def bytes_per_token(self) -> dict[str, float]:
        """Sent in forward and in backward, of each of a rank's tokens, for each other rank."""
        pairs = self.case.tokens // self.cp_size * (self.cp_size - 1)
        sent = {"forward": self.forward_sent_bytes, "backward": self.backward_sent_bytes}
        return {name: num_bytes / pairs for name, num_bytes in sent.items()}


class CPReport(kit.Report):
    """One run, with one number of ranks."""

    row, case = Row, RingCase
    plotted = (
        (f"{_PANEL}: step [ms]", "step_ms", "tokens"),
        (f"{_PANEL}: bytes per token", "forward_bytes_per_token", "tokens"),
    )

    def quantities(self, row: Row) -> dict[str, float | None]:
        """Bytes sent and time of a step, and kept memory."""
        sent = row.forward_sent_bytes + row.backward_sent_bytes
        return {"bytes": sent, "time": median(row.step_seconds), "kept": row.kept_bytes}

    def figures(self, row: Row) -> dict[str, float]:
        """Medians, memory, bytes per token, and ratios to Megatron's."""
        times = {"forward_ms": row.forward_seconds, "step_ms": row.step_seconds}
        found = {"cp_size": row.cp_size} | {k: 1e3 * median(x) for k, x in times.items()}
        found |= gibibytes(row)
        found |= {f"{name}_bytes_per_token": x for name, x in row.bytes_per_token.items()}
        return found | {f"{name} of megatron's": x for name, x in self.ratios(row).items()}


class CPBenchmark(kit.Benchmark):
    """The same cases on all processes; rank 0 writes."""

    files = "context_parallel"
    report = CPReport
    options = kit.declare(
        "folder render only heads=16,128 seconds_per_row=5 seed=1234",
        sizes=kit.sizes("tokens of a whole sequence or pack, k is 1024", "16k,32k,64k,128k"),
        layouts=kit.some(
            "input layouts: sbhd (one sequence), thd (a pack of documents)", LAYOUTS, "sbhd"
        ),
        documents=kit.number("documents of a pack, equally long", 4),
        cp_comm_types=kit.some(
            "how the ranks of our layer exchange latents", CP_COMM_TYPES, "all_gather,p2p"
        ),
        recompute=kit.some(
            "modules that both layers recompute in backward; both values give rows of each",
            RECOMPUTE,
            "none",
        ),
        dims=kit.DIMS,
    )
    quick = "--sizes 64 --layouts sbhd,thd --documents 2 --recompute none,mla_up_proj"
    recorded = ("dims",)

    def prepare(self) -> None:
        """Refuse what does not divide, then the processes."""
        self._cases = self.cases()
        # Only here, so that --help, --render and wrong input need no torch.
        from benchmarks.kit.processes import CaseError

        super().prepare()
        # Raised on every rank, if a case fails on any.
        self.errors = CaseError

    def about(self) -> dict:
        """With the backend and the environment variables of communication."""
        on_gpu = self.processes.on_gpu
        return super().about() | {
            "processes": self.processes.size,
            "backend": torch.distributed.get_backend(),
            "versions": {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if on_gpu else {},
            "variables": {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "NVTE_"))},
        }

    def cases(self) -> list[RingCase]:
        """Smaller inputs first: what is too large for the machine comes last.

        Raises:
            ValueError: If there is only one rank, or a sequence does not divide.
        """
        args, cp_size = self.args, world_size()
        if cp_size < 2:
            raise ValueError(
                "context parallelism needs 2 or more processes, got 1; start this script by "
                "torchrun --nproc-per-node 2"
            )
        # Megatron's has no other form.
        layers = [("ours", comm_type, "expanded") for comm_type in args.cp_comm_types]
        layers += [("megatron", MEGATRON_COMM_TYPE, "expanded")]
        result: list[RingCase] = []
        for tokens, heads, layout in product(sorted(args.sizes), args.heads, args.layouts):
            documents = args.documents if layout == "thd" else 1
            chunks = documents * 2 * cp_size
            if tokens % chunks:
                raise ValueError(
                    f"--sizes: {tokens} tokens do not divide into {documents} document(s) of "
                    f"2 x {cp_size} chunks; give multiples of {chunks}"
                )
            inputs = (tokens, heads, layout, documents)
            result += [RingCase(*one, *inputs, again) for again in args.recompute for one in layers]
        return result

    def build(self, case: RingCase) -> Subject:
        """The layer with this rank's part of the input.

        Raises:
            Refused: If it cannot be built here.
        """
        from absorbed_mla import AbsorbedMLAOptions
        from benchmarks.kit import layers

        processes = self.processes
        recompute = None if case.recompute == "none" else case.recompute
        more = {"recompute": recompute, "cp_comm_type": case.cp_comm_type}
        config = layers.layer_config(self.args, processes, heads=case.heads, **more)
        options = AbsorbedMLAOptions(form=case.form) if case.implementation == "ours" else None
        packed = None
        if case.layout == "thd":
            lengths = [case.tokens // case.documents] * case.documents
            packed = layers.pack_for_ranks(lengths, processes.device)
        return layers.build(config, options, processes, case.tokens // processes.size, packed)

    def measure(self, case: RingCase) -> Row:
        """Times, memory and bytes of one case.

        Raises:
            CaseError: On every rank, if it fails on any.
        """
        from benchmarks.kit.chosen_backends import ChosenBackends
        from benchmarks.kit.layers import observe
        from benchmarks.kit.timing import Repeated, repeat_together

        args, processes = self.args, self.processes
        subject = processes.together(lambda: self.build(case))
        ran = ChosenBackends(subject.layer)
        repeated = Repeated.of(subject, on_gpu=processes.on_gpu)
        # Compiles, and allocates what stays allocated.
        processes.together(repeated.once)
        observed = processes.together(lambda: observe(subject, processes))
        forward, step = repeat_together(repeated, args.seconds_per_row, processes)
        sent = [observed.forward.num_bytes, observed.backward.num_bytes]
        forward_sent, backward_sent = map(int, processes.maximum(sent))
        traffic = {"forward": observed.forward, "backward": observed.backward}
        return Row(
            case=case,
            cp_size=processes.size,
            forward_seconds=forward,
            step_seconds=step,
            kept_bytes=processes.largest(observed.kept_bytes),
            peak_bytes=processes.largest(observed.peak_bytes),
            forward_sent_bytes=forward_sent,
            backward_sent_bytes=backward_sent,
            traffic={name: one.breakdown() for name, one in traffic.items()},
            ran=str(ran),
        )

    def failed(self, case: RingCase, error: Exception) -> Row:
        """With the number of ranks."""
        return Row(case=case, cp_size=self.processes.size, error=kit.reason(error))


if __name__ == "__main__":
    kit.main(CPBenchmark)
