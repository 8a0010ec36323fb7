"""Ours beside peers, read from recorded results: the comparisons of measurements/performance.md.

A reader yields the rows of a file; a :class:`Section` says which files it reads and which of their
rows table and plot show.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.attention import AttentionReport
from benchmarks.context_parallel import CPReport
from benchmarks.decode import DecodeReport
from benchmarks.dsa import DSAReport
from benchmarks.kit.report import Times
from benchmarks.kit.tables import tokens_text
from benchmarks.served.report import ServingReport
from checks.tables import by_input, recorded, without_errors

MEGATRON, RING, DENSE = "Megatron + TE", "Megatron + TE's ring", "our dense decode"
FLASH_4, PYTORCH = "FlashAttention-4", "PyTorch, memory-efficient"


@dataclass(frozen=True)
class Row:
    """Ours and a peer's times of one work, measured in one file."""

    work: str  # what both do, for people
    peer: str  # name of the other implementation
    ours: Times  # seconds
    theirs: Times  # seconds of the peer
    # Sizes and options by name, to choose rows by.
    facts: dict[str, Any] = field(default_factory=dict)
    file: str = ""  # of the data, relative to docs/

    @property
    def name(self) -> tuple[str, str]:
        """Equal for repeated measurements of the same."""
        return self.work, self.peer

    @property
    def ratio(self) -> float:
        """Ours of the peer's; below 1 ours is faster."""
        return self.ours.median / self.theirs.median

    @property
    def slower(self) -> bool:
        """Whether ours is, as far as two digits tell."""
        return round(self.ratio, 2) > 1

    @property
    def spread(self) -> tuple[float, float] | None:
        """The ratios that single repetitions allow; None where one side has only one."""
        if min(self.ours.repetitions, self.theirs.repetitions) < 2:
            return None
        return self.ours.least / self.theirs.most, self.ours.most / self.theirs.least

    def fits(self, choices: Iterable[dict[str, tuple]]) -> bool:
        """Whether the facts are among the values of one choice."""
        return any(
            all(self.facts[name] in values for name, values in choice.items()) for choice in choices
        )


def _pairs(
    inputs: Iterable[dict[str, Any]], ours: str, peers: Mapping[str, str]
) -> Iterator[tuple[Any, Any, str]]:
    """Of every input our row and that of each peer, where both are there, with its name."""
    for found in inputs:
        for name, called in peers.items():
            if ours in found and name in found:
                yield found[ours], found[name], called


def layer_work(heads: int, tokens: int, layout: str) -> str:
    """``"128 heads, 8k, one sequence"``."""
    kinds = {"sbhd": "one sequence", "thd": "pack"}
    return f"{heads} heads, {tokens_text(tokens)}, {kinds[layout]}"


def layer_rows(path: Path) -> Iterator[Row]:
    """A step of a layer beside Megatron's with the same recomputation and precision."""
    report = AttentionReport.read(path)
    for row in report.of("layer"):
        case, peer = row.case, report.peer(row)
        if case.implementation != "ours" or peer is None or not (row.step and peer.step):
            continue
        recompute = ", recomputed" if case.recompute else ""
        precision = f", {case.precision}" if case.precision != "bf16" else ""
        work = layer_work(case.heads, case.tokens, case.layout) + recompute + precision
        yield Row(work, MEGATRON, row.step, peer.step, vars(case))


def fp8_rows(path: Path) -> Iterator[Row]:
    """The layers of :func:`layer_rows` whose products are in FP8."""
    return (row for row in layer_rows(path) if row.facts["precision"] != "bf16")


# By form: ours and the peers, by their names in the file, and the widths.
_CORE = {
    "expanded": (
        "ours, flash_attention_4",
        {"FlashAttention-4": FLASH_4, "TransformerEngine": "TE with cuDNN"},
        "192/128",
    ),
    "absorbed": ("ours, hopper", {"torch, efficient": PYTORCH}, "576/512"),
}


def core_rows(path: Path) -> Iterator[Row]:
    """Forward and backward of the attention alone; some have no backward."""
    inputs = by_input(
        AttentionReport.read(path).of("core"),
        lambda row: (row.case.form, row.case.heads, row.case.tokens),
    )
    for found in inputs:
        name, peers, widths = _CORE[next(iter(found.values())).case.form]
        for ours, theirs, called in _pairs([found], name, peers):
            for way in ("forward", "backward"):
                own, other = getattr(ours, way), getattr(theirs, way)
                if own and other:
                    sizes = f"{ours.case.heads} heads, {tokens_text(ours.case.tokens)}"
                    facts = {**vars(ours.case), "peer": called}
                    yield Row(f"{widths} {way}, {sizes}", called, own, other, facts)


def latent_rows(path: Path) -> Iterator[Row]:
    """Forward over the latent, of calls that are queued and of calls that the host waits for."""
    peers = {"FlashAttention-3": "FlashAttention-3"}
    inputs = by_input(recorded(path), lambda row: (row.case.work, row.case.heads, row.case.tokens))
    for ours, theirs, peer in _pairs(inputs, "ours, hopper", peers):
        case = ours.case
        work = f"{case.work}, {case.heads} heads, {tokens_text(case.tokens)}"
        yield Row(f"{work}, queued", peer, ours.times, theirs.times, vars(case))
        yield Row(f"{work}, called", peer, ours.called, theirs.called, vars(case))


def ring_rows(path: Path) -> Iterator[Row]:
    """A layer's step beside Megatron's, whose attention is TransformerEngine's ring.

    Where only ours was measured recomputed, it is compared with theirs that is not: ours then
    computes more, and the row says so.
    """
    inputs = by_input(
        CPReport.read(path).measured,
        lambda row: row.compared[:-1],
        lambda row: (row.case.implementation, row.case.cp_comm_type, row.case.recompute),
    )
    for found in inputs:
        for (implementation, cp_comm_type, recompute), ours in found.items():
            theirs = found.get(("megatron", "p2p", recompute))
            recomputed = "" if recompute == "none" else ", recomputed"
            if not theirs:
                theirs = found.get(("megatron", "p2p", "none"))
                recomputed = ", recomputed by ours only"
            if implementation != "ours" or not theirs:
                continue
            case = ours.case
            way = "" if cp_comm_type == "all_gather" else f", ours {cp_comm_type}"
            work = layer_work(case.heads, case.tokens, case.layout) + recomputed + way
            times = (Times.of(row.step_seconds) for row in (ours, theirs))
            facts = {**vars(case), "cp_size": ours.cp_size}
            yield Row(f"CP {ours.cp_size}, {work}", RING, *times, facts)


def pretraining_rows(path: Path) -> Iterator[Row]:
    """An iteration in Megatron's own loop, with our attention and with Megatron's."""
    report = json.loads(path.read_text())
    runs = {run["attention"]: run for run in report["runs"]}
    ours, theirs = (
        Times.of([one["seconds"] for one in run["iterations"][run["skip"] :]])
        for run in (runs["absorbed"], runs["standard"])
    )
    tokens = report["environment"]["tokens_per_iteration"]
    size = f"{runs['absorbed']['parameters'] / 1e6:.0f} M parameters"
    yield Row(f"one iteration of {tokens} tokens, {size}", "Megatron's own MLA", ours, theirs)


def decode_rows(path: Path) -> Iterator[Row]:
    """Attention over a paged cache, beside both libraries that serve DeepSeek's models."""
    peers = {"FlashMLA": "FlashMLA", "vLLM, FlashAttention-3": "FlashAttention-3"}
    inputs = by_input(DecodeReport.read(path).measured)
    for ours, theirs, peer in _pairs(inputs, "ours, hopper", peers):
        case = ours.case
        requests = "request" if case.batch == 1 else "requests"
        equal, keys = case.lengths == "equal", tokens_text(case.kv)
        lengths = f"of {keys}" if equal else f"up to {keys}, {case.lengths.replace('_', ' ')}"
        new = "" if case.query_length == 1 else f", {case.query_length} new tokens each"
        block = "" if case.block_size == 64 else f", blocks of {case.block_size}"
        work = f"{case.batch} {requests} {lengths}, {case.heads} heads{new}{block}"
        yield Row(work, peer, ours.times, theirs.times, vars(case))


_SERVERS = {"ours": {"vllm": "vLLM"}, "ours-server": {"vllm-server": "vLLM's server"}}


def serving_rows(path: Path) -> Iterator[Row]:
    """The time of 1,024 prompt tokens at the rate of prefill, and of a decode step.

    Of traffic, that of 1,024 output tokens at its rate, and until the first token of a request.
    """
    for found in by_input(ServingReport.read(path).measured, lambda row: row.case.work):
        for name, peers in _SERVERS.items():
            for *pair, peer in _pairs([found], name, peers):
                case = pair[0].case
                facts = {"requests": case.size.requests, "prompt": case.size.prompt}
                if case.size.rounds > 1:
                    times = {
                        "1k of outputs": [1024 / one.output_tokens_per_second for one in pair],
                        "first token": [one.ttft_ms / 1e3 for one in pair],
                    }
                else:
                    times = {
                        "1k of prompts": [1024 / one.prefill_tokens_per_second for one in pair],
                        "decode step": [one.step_ms / 1e3 for one in pair],
                    }
                for what, seconds in times.items():
                    both = (Times.of([one]) for one in seconds)
                    yield Row(f"{what}, {case.work}", peer, *both, facts)


def sparse_rows(path: Path) -> Iterator[Row]:
    """Forward and backward over chosen keys, beside FlashMLA and TileLang."""
    peers = {name: name for name in ("FlashMLA", "TileLang")}
    for ours, theirs, peer in _pairs(by_input(DSAReport.read(path).measured), "hopper", peers):
        case = ours.case
        keys = "shared" if case.shared else "random"
        work = f"{case.work}, {case.heads} heads, {tokens_text(case.kv)}, {keys} choice"
        yield Row(work, peer, ours.times, theirs.times, vars(case))


def sparse_decode_rows(path: Path) -> Iterator[Row]:
    """Choice and attention beside dense decode; attention alone beside FlashMLA's.

    FlashMLA does not choose: the time of our attention alone is recorded without its spread.
    """
    inputs = by_input(
        recorded(path),
        lambda row: (row.case.heads, row.case.batch, row.case.kv),
    )
    peers = {"dense, hopper": DENSE, "FlashMLA": "FlashMLA"}
    for ours, theirs, peer in _pairs(inputs, "sparse, hopper", peers):
        case, what, times = ours.case, "decode", ours.times
        if peer != DENSE:
            what, times = "decode, attention alone", Times.of([ours.more.attend_us / 1e6])
        sizes = f"{case.batch} requests of {tokens_text(case.kv)}, {case.heads} heads"
        yield Row(f"{what}, {sizes}", peer, times, theirs.times, vars(case))


# Works of dsa_layer.py, as the page calls them.
_LAYERS = {
    "megatron": "Megatron, plain PyTorch",
    "megatron-tilelang": "Megatron, TileLang",
    "megatron-cudnn": "Megatron, cuDNN and FlashMLA",
    "slot": "Megatron's DSAttention in our layer",
    "dense": "our dense layer",
}


def sparse_layer_rows(path: Path) -> Iterator[Row]:
    """A step of our sparse layer beside each other layer."""
    for row in recorded(path):
        steps = {work.name: work.step for work in without_errors(row.works)}
        work = f"layer, {row.case.heads} heads, {tokens_text(row.case.tokens)}"
        for ours, theirs, called in _pairs([steps], "sparse", _LAYERS):
            yield Row(work, called, ours, theirs, {**vars(row.case), "work": "layer"})


_ALL: tuple[dict, ...] = ({},)
K = 1024


@dataclass(frozen=True)
class Section:
    """Rows of one kind of work."""

    title: str  # of the group, in the table and in the plot
    files: tuple[str, ...]  # under docs/; those that do not exist are left out
    read: Callable[[Path], Iterable[Row]]  # the rows of a file
    # What the table shows: choices of facts. The row in which ours is slowest beside a peer is
    # shown in any case.
    shown: tuple[dict, ...] = _ALL
    drawn: tuple[dict, ...] = _ALL  # what of it the plot shows besides that row

    def measured(self, docs: Path) -> Measured:
        """Its rows under ``docs``."""
        rows = [
            replace(row, file=file)
            for file in self.files
            if (docs / file).exists()
            for row in self.read(docs / file)
        ]
        return Measured(self, rows)


@dataclass(frozen=True)
class Measured:
    """A section with its data: all rows of all files, in the order of the files."""

    section: Section
    every: list[Row]

    @property
    def typical(self) -> list[Row]:
        """Of every work the run with the median ratio; of an even number the slower of both."""
        found: dict[tuple, list[Row]] = defaultdict(list)
        for row in self.every:
            found[row.name].append(row)
        ordered = (sorted(rows, key=lambda row: row.ratio) for rows in found.values())
        return [rows[len(rows) // 2] for rows in ordered]

    @property
    def shown(self) -> list[Row]:
        """The rows of the table."""
        return self._chosen(self.section.shown)

    @property
    def drawn(self) -> list[Row]:
        """The bars of the plot."""
        return self._chosen(self.section.drawn)

    def repeats(self, row: Row) -> list[float]:
        """Ratios of the same work in other files."""
        return [one.ratio for one in self.every if one.name == row.name and one.file != row.file]

    def _chosen(self, choices: tuple[dict, ...]) -> list[Row]:
        slowest = max(self.typical, key=lambda row: row.ratio, default=None)
        return [row for row in self.typical if row is slowest or row.fits(choices)]


def measured(docs: Path) -> list[Measured]:
    """All sections that have rows."""
    return [one for one in (section.measured(docs) for section in SECTIONS) if one.every]


def _files(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}.json" for name in names)


SECTIONS = (
    Section(
        "Attention layer, forward and backward",
        (
            "attention/layer.json",
            *_files("remeasured", "layer-16-heads-a", "layer-16-heads-b", "layer", "layer-again"),
        ),
        layer_rows,
        shown=({"tokens": (8 * K, 64 * K)}, {"tokens": (4 * K,), "heads": (16,)}),
        drawn=({"tokens": (8 * K,), "recompute": (False,)},),
    ),
    Section(
        "Attention layer, without flash-attn-4",
        ("attention/layer-hopper-expanded.json",),
        layer_rows,
        drawn=({"tokens": (8 * K,), "heads": (128,)},),
    ),
    Section(
        "Attention layer, FP8",
        ("fp8/layer.json",),
        fp8_rows,
        drawn=({"precision": ("blockwise",), "recompute": (False,), "heads": (128,)},),
    ),
    Section(
        "Attention alone, widths of keys/values",
        ("attention/core.json", "remeasured/core.json"),
        core_rows,
        shown=({"tokens": (8 * K,)},),
        drawn=({"tokens": (8 * K,), "heads": (128,), "peer": (FLASH_4, PYTORCH)},),
    ),
    Section(
        "Attention over the latent, forward",
        ("kernels/latent.json",),
        latent_rows,
        drawn=({"tokens": (8 * K,), "heads": (128,)},),
    ),
    Section(
        "Context parallelism, layer, forward and backward",
        (
            *_files("context-parallel", "h200-x2", "h200-x2-none", "h200-x4"),
            *_files("remeasured", "context-parallel-before", "context-parallel"),
        ),
        ring_rows,
        shown=({"tokens": (32 * K,)}, {"tokens": (128 * K,), "heads": (128,)}),
        drawn=({"tokens": (128 * K,), "heads": (128,), "recompute": ("mla_up_proj",)},),
    ),
    Section(
        "Context parallelism, without flash-attn-4",
        ("context-parallel/h100-x2-hopper-expanded.json",),
        ring_rows,
        drawn=({"tokens": (32 * K,), "heads": (128,), "cp_comm_type": ("all_gather",)},),
    ),
    Section(
        "Pretraining in Megatron's loop",
        _files("pretraining", "pretraining", "pretraining-1", "pretraining-2"),
        pretraining_rows,
    ),
    Section(
        "Decode, attention over a paged cache",
        _files("decode", "blocks", "decode", "flash-attention-3", "lengths", "one-long"),
        decode_rows,
        shown=({"kv": (8 * K,), "batch": (1, 128)}, {"kv": (32 * K,), "batch": (32,)}),
        drawn=(
            {
                "kv": (8 * K,),
                "batch": (128,),
                "heads": (16, 128),
                "lengths": ("equal", "uniform"),
                "query_length": (1,),
                "block_size": (64,),
            },
        ),
    ),
    Section(
        "LLM and server, 4 dense and 4 MoE layers, requests x prompt/output",
        _files("generation", "serving", "serving-128x8k", "serving-server", "traffic"),
        serving_rows,
        drawn=({"requests": (128,)},),
    ),
    Section(
        "Sparse attention over 2k chosen keys",
        ("dsa/kernels.json",),
        sparse_rows,
        shown=({"heads": (16, 128)},),
        drawn=({"heads": (16, 128), "kv": (32 * K,), "shared": (False,)},),
    ),
    Section(
        "Sparse decode: 2k of the keys are chosen and attended to; alone: given the choice",
        ("dsa/decode.json",),
        sparse_decode_rows,
        drawn=({"heads": (128,), "kv": (32 * K, 128 * K)},),
    ),
    Section(
        "Sparse layer, forward and backward",
        _files("dsa", "layer", "layer-4k", "layer-tilelang"),
        sparse_layer_rows,
    ),
)
