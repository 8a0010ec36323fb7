#!/usr/bin/env python3
"""Measure one attention layer under context parallelism, ours beside Megatron's own.

    $ torchrun --nproc-per-node 2 scripts/benchmarks/context_parallel.py docs/context-parallel \
          --profile
    $ torchrun --nproc-per-node 2 scripts/benchmarks/context_parallel.py /tmp/quick \
          --sizes 64,128 --heads 4 --hidden-size 64 --q-lora-rank 32 --kv-lora-rank 32
    $ python scripts/benchmarks/context_parallel.py /tmp/both --render two.json four.json

All processes are one context-parallel group. For every sequence length, number of heads and layout
it measures step time (of the slowest rank, from when all ranks begin), memory and the bytes that a
rank really sends. Bytes per token are for each of a rank's tokens and each other rank: with S
tokens on n ranks, sent / (S / n * (n - 1)). Each row is compared with Megatron's layer on the same
input with the same recomputation. The dimensions are DeepSeek-V3's; GPUs compute in bfloat16, CPUs
in float32. A case that fails (memory, or something unsupported) has its error in its row, and the
others go on; only if one rank fails alone in the middle of a step, the run ends after --timeout.
Results are written after every case. Output:

    ours p2p expanded sbhd S=16384 n=128 (expanded, cudnn): forward_ms 11.2, step_ms 34.1, ...

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from absorbed_mla.options import CP_COMM_TYPES, FORMS
from benchmarks.kit import arguments, provenance
from benchmarks.kit.arguments import DIMS, count, dims_of, list_of, one_of, parse_sizes, seconds
from benchmarks.kit.plot import Panel, collected
from benchmarks.kit.report import Report, Results
from benchmarks.kit.tables import gibibytes
from console.parser import Parser
from console.ranks import world_size
from console.script import leave, run_script

if TYPE_CHECKING:
    from benchmarks.kit.layers import Subject
    from benchmarks.kit.processes import Processes

NAME = "context_parallel"
LAYOUTS = ("sbhd", "thd")
IMPLEMENTATIONS = ("ours", "megatron")
RECOMPUTE = ("none", "mla_up_proj")
# What TransformerEngine 2.12 accepts for multi-head latent attention.
MEGATRON_COMM_TYPE = "p2p"

# ---- cases


@dataclass(frozen=True)
class Case:
    """One layer and one input that is measured.

    Attributes:
        implementation: ``"ours"`` or ``"megatron"``.
        cp_comm_type: As in Megatron's config.
        form: Of ours; ``"expanded"`` for Megatron's own, which knows no other.
        tokens: Of the whole sequence or pack.
        heads: Of the layer.
        layout: ``"sbhd"``, or ``"thd"``: a pack of equal documents.
        documents: In the pack; 1 for ``sbhd``.
        recompute: Module that is recomputed in backward, or ``"none"``.
    """

    implementation: str
    cp_comm_type: str
    form: str
    tokens: int
    heads: int
    layout: str
    documents: int
    recompute: str

    def __str__(self) -> str:
        recompute = "" if self.recompute == "none" else f" recompute {self.recompute}"
        return (
            f"{self.implementation} {self.cp_comm_type} {self.form}{recompute} {self.layout} "
            f"S={self.tokens} n={self.heads}"
        )

    @property
    def compared(self) -> tuple:
        """What cases that are compared have in common."""
        return self.layout, self.documents, self.tokens, self.heads, self.recompute


def cases(args: argparse.Namespace, cp_size: int) -> list[Case]:
    """All cases, smaller inputs first: what is too large for the machine comes last.

    Raises:
        ValueError: If there is only one rank, or a sequence does not divide.
    """
    if cp_size < 2:
        raise ValueError(
            "context parallelism needs 2 or more processes, got 1; start this script by "
            "torchrun --nproc-per-node 2"
        )
    layers = [("ours", comm_type, args.form) for comm_type in args.cp_comm_types]
    layers += [("megatron", MEGATRON_COMM_TYPE, "expanded")]
    layers = [layer for layer in layers if layer[0] in args.implementations]
    result: list[Case] = []
    for tokens in sorted(args.sizes):
        for heads in args.heads:
            for layout in args.layouts:
                documents = args.documents if layout == "thd" else 1
                _require_divisible(tokens, documents, cp_size)
                inputs = (tokens, heads, layout, documents)
                result += [Case(*way, *inputs, again) for again in args.recompute for way in layers]
    return arguments.chosen(result, args.only)


def _require_divisible(tokens: int, documents: int, cp_size: int) -> None:
    chunks = documents * 2 * cp_size
    if tokens % chunks:
        raise ValueError(
            f"--sizes: {tokens} tokens do not divide into {documents} document(s) of "
            f"2 x {cp_size} chunks; give multiples of {chunks}"
        )


# ---- command line


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse ``argv``.

    Raises:
        ValueError: After wrong input.
    """
    parser = Parser("context_parallel.py", __doc__)
    add = parser.add_argument
    arguments.add_folder(parser, "context_parallel.json and .png")
    arguments.add_only(parser)
    add(
        "--sizes", type=parse_sizes, default="16k,32k,64k,128k", help="tokens of a sequence or pack"
    )
    add("--heads", type=list_of(count), default="16,128", help="of the layer")
    add("--layouts", type=list_of(one_of(LAYOUTS)), default="sbhd", help="thd: packs")
    add("--documents", type=count, default=4, help="equal ones in a thd pack")
    add(
        "--implementations",
        type=list_of(one_of(IMPLEMENTATIONS)),
        default="ours,megatron",
        help="whose layers",
    )
    add(
        "--cp-comm-types",
        type=list_of(one_of(CP_COMM_TYPES)),
        default="all_gather,p2p",
        help="how ranks exchange latents in ours",
    )
    add("--form", choices=FORMS, default="expanded", help="how ours is executed")
    add(
        "--recompute",
        type=list_of(one_of(RECOMPUTE)),
        default="none",
        help="in both layers, none or mla_up_proj, or both for rows of each",
    )
    add("--rope-type", choices=("rope", "yarn"), default="rope", help="rotary embedding")
    add("--warmup", type=count, default=1, help="steps that are not timed")
    add("--seconds-per-row", type=seconds, default=5.0, help="for timed steps")
    add("--timeout", type=seconds, default=120.0, help="of a collective, in s")
    add("--profile", action="store_true", help="measure the overlap of communication (ours, GPU)")
    arguments.add_seed(parser, "weights and inputs")
    arguments.add_dims(parser, DIMS)
    args = parser.parse_args(argv)
    arguments.check_files(args.folder, args.render)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or render what was measured; returns the exit code, 2 after wrong input."""
    return run_script("context_parallel.py", lambda: _run(parse_arguments(argv)))


def _run(args: argparse.Namespace) -> None:
    if args.render:
        results(CPReport.show_again(args.render)).publish(args.folder, NAME)
    else:
        measure_all(args)


def measure_all(args: argparse.Namespace) -> None:
    """Measure every case on all processes; rank 0 writes.

    Raises:
        ValueError: If the cases cannot be cut over the processes.
    """
    wanted = cases(args, world_size())
    # Only here, so that --help and --render need no torch.
    import torch

    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    from benchmarks.kit.processes import Processes

    processes = Processes(args.seed, args.timeout)
    first = processes.rank == 0
    if args.profile and not processes.on_gpu and first:
        print("--profile has no effect: there is no GPU.")
    environment = provenance.describe(
        processes.on_gpu,
        processes.dtype,
        processes=processes.size,
        backend=torch.distributed.get_backend(),
        dims=dims_of(args),
        rope_type=args.rope_type,
        versions=_nccl() if processes.on_gpu else {},
        variables={k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "NVTE_"))},
    )
    report = CPReport(environment)
    for case in wanted:
        report.rows.append(measure(case, args, processes))
        if first:
            report.write(args.folder / f"{NAME}.json")
            print(report.line(report.rows[-1]), flush=True)
    if first:
        results([report]).publish(args.folder, NAME)
    processes.leave()


def _nccl() -> dict[str, str]:
    import torch

    return {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}


# ---- measuring


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case, or why there are no figures of it.

    Times and bytes are the largest over the ranks; those of a repetition over the same repetition.

    Attributes:
        case: What was measured.
        cp_size: Ranks.
        forward_seconds: Every timed forward.
        step_seconds: Every timed forward and backward.
        kept_bytes: Allocated by forward until backward; None without a GPU.
        peak_bytes: The most allocated during a step beyond weights, input and output gradient;
            None without a GPU.
        forward_sent_bytes: By a rank. Of collectives as in a ring of n ranks: an all-gather of x
            sends (n - 1) x, a reduce-scatter of n x as much, an all-reduce of x 2 (n - 1) / n x.
        backward_sent_bytes: By a rank, counted likewise.
        traffic: Of "forward" and "backward", rank 0's calls by operation, group size and dtype.
        forward_overlap: Least fraction of the time of a rank's NCCL kernels in forward, waiting
            included, that other kernels run in; None if not measured.
        backward_overlap: The same of backward.
        ran: Form and backend that a layer of ours took; empty if that was not recorded.
        error: Empty, or why the figures are missing.
    """

    case: Case
    cp_size: int
    forward_seconds: Sequence[float] = ()
    step_seconds: Sequence[float] = ()
    kept_bytes: int | None = None
    peak_bytes: int | None = None
    forward_sent_bytes: int = 0
    backward_sent_bytes: int = 0
    traffic: dict[str, list[dict]] | None = None
    forward_overlap: float | None = None
    backward_overlap: float | None = None
    ran: str = ""
    error: str = ""

    @property
    def bytes_per_token(self) -> dict[str, float]:
        """Sent in forward and in backward, of each of a rank's tokens, for each other rank."""
        pairs = self.case.tokens // self.cp_size * (self.cp_size - 1)
        sent = {"forward": self.forward_sent_bytes, "backward": self.backward_sent_bytes}
        return {name: num_bytes / pairs for name, num_bytes in sent.items()}


def measure(case: Case, args: argparse.Namespace, processes: Processes) -> Row:
    """Measure one case; of a case that fails on any rank, every rank has the error in its row."""
    import torch

    from benchmarks.kit.processes import CaseError

    try:
        return _measure(case, args, processes)
    except CaseError as error:
        return Row(case=case, cp_size=processes.size, error=str(error))
    finally:
        gc.collect()
        if processes.on_gpu:
            torch.cuda.empty_cache()


def _measure(case: Case, args: argparse.Namespace, processes: Processes) -> Row:
    from benchmarks.kit.chosen_backends import ChosenBackends
    from benchmarks.kit.layers import observe
    from benchmarks.kit.timing import Repeated

    subject = processes.together(lambda: build(case, args, processes))
    ran = ChosenBackends(subject.layer)
    repeated = Repeated(
        subject.forward, subject.backward, subject.forget_gradients, on_gpu=processes.on_gpu
    )
    for _ in range(args.warmup):
        processes.together(repeated.once)
    observed = processes.together(lambda: observe(subject, processes))
    forward, step = _repeat(repeated, args.seconds_per_row, processes)
    overlaps: tuple[float | None, float | None] = (None, None)
    if args.profile and processes.on_gpu and case.implementation == "ours":
        overlaps = _overlaps(subject, processes)
    sent = [observed.forward.num_bytes, observed.backward.num_bytes]
    forward_sent, backward_sent = map(int, processes.maximum(sent))
    return Row(
        case=case,
        cp_size=processes.size,
        forward_seconds=forward,
        step_seconds=step,
        kept_bytes=_largest(observed.kept_bytes, processes),
        peak_bytes=_largest(observed.peak_bytes, processes),
        forward_sent_bytes=forward_sent,
        backward_sent_bytes=backward_sent,
        traffic={
            "forward": observed.forward.breakdown(),
            "backward": observed.backward.breakdown(),
        },
        forward_overlap=overlaps[0],
        backward_overlap=overlaps[1],
        ran=str(ran),
    )


def build(case: Case, args: argparse.Namespace, processes: Processes) -> Subject:
    """The layer with this rank's part of the input.

    Raises:
        Refused: If it cannot be built here.
    """
    from absorbed_mla import AbsorbedMLAOptions
    from benchmarks.kit import layers

    config = layers.layer_config(
        args,
        processes,
        heads=case.heads,
        recompute=None if case.recompute == "none" else case.recompute,
        cp_comm_type=case.cp_comm_type,
    )
    options = AbsorbedMLAOptions(form=case.form) if case.implementation == "ours" else None
    packed = None
    if case.layout == "thd":
        lengths = [case.tokens // case.documents] * case.documents
        packed = layers.pack(lengths, processes.device)
        # The same: TransformerEngine asks for them under context parallelism.
        packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = packed.cu_seqlens_q
    return layers.build(config, options, processes, case.tokens // processes.size, packed)


def _repeat(repeated, budget: float, processes: Processes) -> tuple[list[float], list[float]]:
    """Seconds of every forward, and of every forward and backward, the slowest rank's."""
    from benchmarks.kit.timing import repetitions

    forward: list[float] = []
    step: list[float] = []
    wanted = 1
    while len(step) < wanted:
        [times] = processes.together(lambda: repeated.steps(1))
        slowest = processes.maximum([times[0], times[2]])
        forward.append(slowest[0])
        step.append(slowest[1])
        # All ranks know the same times, and so the same count.
        wanted = max(wanted, repetitions(step[0], budget))
    return forward, step


def _overlaps(subject: Subject, processes: Processes) -> tuple[float | None, float | None]:
    """Least overlap over the ranks, of a forward and of its backward."""
    from benchmarks.kit.overlap import overlap_fraction
    from benchmarks.kit.processes import CaseError

    outputs: list = []
    steps = (lambda: outputs.append(subject.forward()), lambda: subject.backward(outputs[0]))
    try:
        both = [processes.together(partial(overlap_fraction, step)) for step in steps]
    except CaseError as error:
        # A profiler that fails takes no other figure with it.
        if processes.rank == 0:
            print(f"No overlap: {error}")
        return None, None
    # Below every fraction, so that one rank without is found.
    least = processes.maximum([-(-1.0 if one is None else one) for one in both])
    forward, backward = (None if value == 1 else -value for value in least)
    return forward, backward


def _largest(value: int | None, processes: Processes) -> int | None:
    return None if value is None else int(processes.maximum([value])[0])


# ---- report


class CPReport(Report):
    """One run, with one number of ranks."""

    row = Row

    def peer(self, row: Row) -> Row | None:
        """Megatron's layer on the same input with the same recomputation, if it was measured."""
        for other in self.measured:
            alike = (other.cp_size, other.case.compared) == (row.cp_size, row.case.compared)
            if alike and other.case.implementation == "megatron":
                return other
        return None

    def ratios(self, row: Row) -> dict[str, float]:
        """Bytes sent and time of a step, and kept memory, divided by the peer's."""
        peer = self.peer(row)
        if peer is None or peer is row:
            return {}
        sent, theirs = (r.forward_sent_bytes + r.backward_sent_bytes for r in (row, peer))
        found = {"bytes": sent / theirs} if theirs else {}
        found["time"] = median(row.step_seconds) / median(peer.step_seconds)
        if row.kept_bytes and peer.kept_bytes:
            found["kept"] = row.kept_bytes / peer.kept_bytes
        return found

    def as_json(self, row: Row) -> dict:
        """With medians and bytes per token, for readers of the file."""
        content = asdict(row)
        if not row.error:
            for name in ("forward", "step"):
                times = getattr(row, f"{name}_seconds")
                content[f"{name}_ms"] = {
                    what.__name__: 1e3 * what(times) for what in (median, min, max)
                }
            for name, value in row.bytes_per_token.items():
                content[f"{name}_bytes_per_token"] = value
        return content

    def figures(self, row: Row) -> dict[str, float]:
        """Medians, memory, bytes per token, overlaps, and ratios to Megatron's."""
        found = {
            "cp_size": row.cp_size,
            "forward_ms": 1e3 * median(row.forward_seconds),
            "step_ms": 1e3 * median(row.step_seconds),
        }
        found |= gibibytes(row)
        found |= {f"{name}_bytes_per_token": x for name, x in row.bytes_per_token.items()}
        overlaps = {"forward": row.forward_overlap, "backward": row.backward_overlap}
        found |= {f"{name}_overlap": x for name, x in overlaps.items() if x is not None}
        return found | {f"{name} of megatron's": x for name, x in self.ratios(row).items()}


def results(reports: Sequence[CPReport]) -> Results:
    """Everything that is shown."""
    return Results(reports, panels(reports))


def panels(reports: Sequence[CPReport]) -> list[Panel]:
    """Step time and bytes per token over S, for each number of ranks, layout and head count."""
    return collected(_points(reports), "tokens of the whole sequence", log_y=True)


def _points(reports: Sequence[CPReport]) -> Iterator[tuple[str, str, float, float]]:
    for report in reports:
        for row in report.measured:
            case = row.case
            title = f"{row.cp_size} ranks, {case.layout}, {case.heads} heads"
            recompute = "" if case.recompute == "none" else ", recompute"
            name = f"{case.implementation}, {case.cp_comm_type}, {case.form}{recompute}"
            yield f"{title}: step [ms]", name, case.tokens, 1e3 * median(row.step_seconds)
            for way, value in row.bytes_per_token.items():
                if value:
                    yield f"{title}: bytes per token, {way}", name, case.tokens, value


if __name__ == "__main__":
    leave(main())
