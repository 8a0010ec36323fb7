#!/usr/bin/env python3
"""Measure DeepSeek Sparse Attention: attention over chosen keys, and the indexer that chooses.

    $ python scripts/benchmarks/dsa.py --json dsa.json
    $ python scripts/benchmarks/dsa.py --only "backward n=128"
    $ python scripts/benchmarks/dsa.py --render docs/measurements/dsa/kernels.json

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
Megatron-Core. Output:

    1.9 s  forward n=128 kv=8192 random: FlashMLA: ms 3.85, tflops 607, difference 0.002
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit
from benchmarks.dsa_inputs import WIDTHS, Inputs, difference, selection, union, whole
from benchmarks.peers.sparse import flash_mla, tilelang_backward, tilelang_forward
from console.parser import Parser

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.kit.timing import Repeated

torch: Any = kit.lazy("torch")
IMPLEMENTATIONS = {
    "forward": ("hopper", "triton", "FlashMLA", "TileLang"),
    "backward": ("hopper", "hopper, in order", "triton", "triton, in order", "TileLang"),
    "indexer": ("triton", "triton_fp8"),
}


@dataclass(frozen=True)
class DSACase(kit.Case):
    """One implementation on one input."""

    text = "{0.work} n={0.heads} kv={0.kv} shared={0.shared}: {0.implementation}"
    work: str  # "forward", "backward" or "indexer"
    heads: int  # of the attention; of the indexer in its rows
    kv: int  # keys
    shared: bool  # whether neighbours share keys
    implementation: str  # one of IMPLEMENTATIONS


class DSAReport(kit.Report):
    """One run."""

    row, case = kit.TimedRow, DSACase
    plotted = (("{0.work} kv={0.kv} shared={0.shared} [TFLOP/s]", "tflops", "heads"),)

    def figures(self, row: kit.TimedRow) -> dict[str, float]:
        """Milliseconds, TFLOP/s, and what is compared."""
        assert row.times is not None
        seconds, more = row.times.median, dict(row.more)
        flops = more.pop("flops", 0)
        rate = {"tflops": flops / seconds / 1e12} if flops else {}
        return {"ms": round(seconds * 1e3, 4), **rate, **more}


class DSABenchmark(kit.InTurns):
    """All implementations of an input in turns."""

    report = DSAReport
    options = kit.declare(
        "json plot render only device heads=128,64,16 seconds_per_row=0.1 time_limit=80 seed=1234",
        queries=kit.number("queries of the attention", 4096),
        topk=kit.number("keys that a query attends to", 2048),
        kv=kit.sizes("keys of the attention", "8k,32k"),
        indexer=kit.sizes("keys of the indexer", "8k,32k,128k"),
        indexer_heads=kit.number("heads of the indexer", 64),
        dims=WIDTHS,
    )
    quick = "--queries 2 --topk 8 --kv 32 --indexer 32 --indexer-heads 2"
    recorded = ("queries", "topk", "ceilings")

    @classmethod
    def check(cls, parser: Parser, args: argparse.Namespace) -> None:
        """Keys are chosen among those that there are."""
        if args.topk > min(args.kv + args.indexer):
            parser.error(
                f"--topk must be at most the keys of --kv and --indexer: {args.topk} are more "
                f"than {min(args.kv + args.indexer)}"
            )

    def prepare(self) -> None:
        """Of one device; a CPU interprets Triton's kernels."""
        self.interpret_on_cpu()
        self.use_one_device()
        self.content, self.rope = self.args.kv_lora_rank, self.args.qk_pos_emb_head_dim
        self.scale = (self.content + self.rope) ** -0.5

    def about(self) -> dict:
        """With the widths of the latent."""
        found = super().about() | {"widths": [self.content, self.rope]}
        self._ceilings = found["ceilings"]
        return found

    def cases(self) -> list[DSACase]:
        """The table of attention first, then the indexer."""
        args = self.args
        attention = [
            (work, heads, kv, shared)
            for work in ("forward", "backward")
            for heads in args.heads
            for kv in args.kv
            for shared in (False, True)
        ]
        indexer = [("indexer", args.indexer_heads, kv, False) for kv in args.indexer]
        return [
            DSACase(*one, name) for one in attention + indexer for name in IMPLEMENTATIONS[one[0]]
        ]

    def begin(self, case: DSACase) -> None:
        """Inputs, and what they must give."""
        if case.work != "indexer":
            self.now.inputs = self.inputs(case)
            self.now.wanted = self.now.inputs.expected(case.work, self.scale)

    def work(self, case: DSACase) -> tuple[Repeated, dict]:
        """A call whose result has been compared."""
        from benchmarks.kit.timing import Repeated

        if case.work == "indexer":
            from benchmarks.dsa_indexer import indexer_work

            sizes = case.heads, case.kv, self.args.topk
            run, more = indexer_work(case.implementation, *sizes, self.dtype, self.randoms()[0])
        else:
            run = self.implementation(case, self.now.inputs, self.now.wanted)
            more = {"flops": self.flops(case), "difference": difference(run(), self.now.wanted)}
            more["union"] = union(self.now.inputs.chosen)
        work = Repeated(run, on_gpu=self.on_gpu)
        work.once()
        vars(self.now).setdefault("more", {})[case] = more
        return work, {"more": more}

    def repeated(self, seconds: Mapping[Any, Sequence[float]]) -> dict[Any, dict[str, Any]]:
        """Of the indexer, what it adds to the fastest of our sparse forwards of 128 heads."""
        case = next(iter(seconds))
        beside = self._forward_beside(case) if case.work == "indexer" else None
        if beside is None:
            return {}
        per_query, peak = beside / self.args.queries, self._ceilings["matmul_tflops"] * 1e12
        found = {}
        for case, own in seconds.items():
            more = self.now.more[case]
            share = kit.Times.of(own).median / more["queries"] / per_query
            bound = more["flops"] / more["queries"] / peak / per_query
            found[case] = {"more": more | {"share": share, "bound": bound}}
        return found

    def flops(self, case: DSACase) -> float:
        """Of the attention, see above."""
        width, rope = self.content, self.rope
        pair = 2 * (2 * width + rope)
        if case.work == "backward":
            pair = 6 * (width + rope) + 4 * width
        return float(self.args.queries * self.args.topk * case.heads * pair)

    def inputs(self, case: DSACase) -> Inputs:
        """Random ones."""
        make, random = self.randoms()
        queries = self.args.queries
        return Inputs(
            random(queries, 1, case.heads, self.content + self.rope),
            random(case.kv, 1, self.content + self.rope),
            random(queries, 1, case.heads, self.content),
            selection(queries, case.kv, self.args.topk, case.shared, make),
        )

    def implementation(
        self, case: DSACase, inputs: Inputs, wanted: tuple[Tensor, ...]
    ) -> Callable[[], tuple[Tensor, ...]]:
        """A call that computes what is compared."""
        from absorbed_mla.core_attention.types import AttentionOutput, OutputGradient
        from absorbed_mla.registry import SPARSE_BACKENDS

        name, _, in_order = case.implementation.partition(", ")
        if name in ("FlashMLA", "TileLang"):
            return self._peer(name, case.work, inputs, wanted)
        if name == "hopper" and not (
            self.on_gpu and torch.cuda.get_device_capability(self.device) == (9, 0)
        ):
            raise kit.Refused("it needs compute capability 9.0")
        backend, latent = SPARSE_BACKENDS[name], inputs.latent()
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
            raise kit.Refused("it needs a GPU")
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

    def _forward_beside(self, case: DSACase) -> float | None:
        """Seconds of the fastest of our sparse forwards of 128 heads over as many keys."""
        from benchmarks.kit.timing import Repeated

        heads, found = 128 if self.on_gpu else case.heads, []
        for name in ("hopper", "triton"):
            one = DSACase("forward", heads, case.kv, False, name)
            try:
                run = self.implementation(one, self.inputs(one), ())
            except kit.Refused:
                continue
            work = Repeated(run, on_gpu=self.on_gpu)
            work.once()
            found.append(work.times(work.once(), self.args.seconds_per_row)[0].median)
        return min(found, default=None)


if __name__ == "__main__":
    kit.main(DSABenchmark)
