#!/usr/bin/env python3
r"""Measure decode with DeepSeek Sparse Attention beside dense decode: one new token per request.

    $ python scripts/benchmarks/dsa_decode.py --json docs/dsa/decode.json
    $ python scripts/benchmarks/dsa_decode.py --heads 16 --kv 8k --only sparse
    $ TRITON_INTERPRET=1 python scripts/benchmarks/dsa_decode.py --device cpu --heads 2 \
          --batches 2 --kv 40 --topk 16 --indexer-heads 2 --indexer-dim 16 --kv-lora-rank 32 \
          --qk-pos-emb-head-dim 16 --block-size 16
    $ python scripts/benchmarks/dsa_decode.py --render docs/dsa/decode.json

Latents and index keys lie in blocks of a cache in random order. Sparse decode is what a layer does
for every token beside its projections: scores of all index keys of the request ("select" is their
time with the choice of --topk keys), the keys' places in the cache, and attention over those
("attend"). Dense decode is the paged backend of the same name. FlashMLA is its attention over the
same keys alone, given their places. A call is recorded as a CUDA graph on a GPU, what is compared
runs in turns, and the L2 cache is overwritten before every repetition, outside of the time.

"bound_us" is the time that the bytes which must be read take at the rate of a copy. Attention is
compared with the reference's in fp32 over the same keys; "agreement" is the part of the first
request's choice that scores in fp32 have, too. Output:

    1.9 s  sparse, hopper n=128 b=32 kv=8192: us 95.1, select_us 50.2, attend_us 40.3

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.kit import arguments, provenance
from benchmarks.kit.arguments import DIMS, parse_sizes
from benchmarks.kit.plot import Panel, collected
from benchmarks.kit.report import Refused, Report, Times
from benchmarks.kit.run import Benchmark
from console.parser import Parser
from console.script import leave

if TYPE_CHECKING:
    from torch import Tensor

_WIDTHS = ("kv-lora-rank", "qk-pos-emb-head-dim")
# More than any L2 cache.
_FLUSHED_BYTES = 256 * 2**20
IMPLEMENTATIONS = (
    "sparse, hopper",
    "sparse, triton",
    "FlashMLA",
    "dense, hopper",
    "dense, triton",
)


@dataclass(frozen=True)
class Case:
    """Requests of one length, and whose attention.

    Attributes:
        implementation: One of :data:`IMPLEMENTATIONS`.
        heads: Of one rank.
        batch: Requests.
        kv: Keys of each, the new token's included.
    """

    implementation: str
    heads: int
    batch: int
    kv: int

    def __str__(self) -> str:
        return f"{self.implementation} n={self.heads} b={self.batch} kv={self.kv}"


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


class DSADecodeReport(Report):
    """One run."""

    row = Row

    def figures(self, row: Row) -> dict[str, float]:
        """Microseconds of the call and of its parts."""
        assert row.times is not None
        return {"us": round(row.times.median * 1e6, 2), **row.more}

    @classmethod
    def panels(cls, reports: Sequence[DSADecodeReport]) -> list[Panel]:
        """Microseconds over the length."""
        points = (
            (f"n={c.heads} b={c.batch} [us]", c.implementation, c.kv, report.figures(row)["us"])
            for report in reports
            for row in report.measured
            for c in (row.case,)
        )
        return collected(points, "keys")


class DSADecodeBenchmark(Benchmark):
    """Sparse and dense decode over the same cache."""

    script = "dsa_decode.py"
    report = DSADecodeReport

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
        self._flushed = torch.empty(
            _FLUSHED_BYTES if self.on_gpu else 0, dtype=torch.uint8, device=device
        )
        self._copy_tbps = 0.0
        self._inputs: tuple[tuple, _Inputs] | None = None

    @classmethod
    def add_options(cls, parser: Parser) -> None:
        """See --help."""
        add = parser.add_argument
        arguments.add_common(parser, json=None, plot=None, render=None, only=None, device=None)
        arguments.add_common(
            parser, heads="128,16", seconds_per_row=0.03, time_limit=80.0, seed=1234
        )
        add("--batches", type=parse_sizes, default="32", help="requests")
        add("--kv", type=parse_sizes, default="4k,8k,32k,128k", help="keys of each request")
        add("--topk", type=arguments.count, default=2048, help="keys that a query attends to")
        add("--indexer-heads", type=arguments.count, default=64, help="heads of the indexer")
        add("--indexer-dim", type=arguments.count, default=128, help="width of one of them")
        add("--block-size", type=arguments.count, default=64, help="tokens of a cache block")
        arguments.add_dims(parser, {name: DIMS[name] for name in _WIDTHS})

    def environment(self) -> dict:
        """With the rates that the device reaches."""
        from benchmarks.kit.timing import ceilings

        reached, args = ceilings(self.on_gpu), self.args
        self._copy_tbps = reached["copy_tbps"]
        return provenance.describe(
            self.on_gpu,
            self.dtype,
            widths=[args.kv_lora_rank, args.qk_pos_emb_head_dim],
            indexer=[args.indexer_heads, args.indexer_dim],
            topk=args.topk,
            block_size=args.block_size,
            ceilings=reached,
        )

    def cases(self) -> list[Case]:
        """Implementations beside each other, short requests first."""
        args = self.args
        inputs = product(sorted(args.kv), sorted(args.batches), args.heads)
        found = [
            Case(implementation, heads, batch, kv)
            for kv, batch, heads in inputs
            for implementation in IMPLEMENTATIONS
        ]
        return arguments.chosen(found, args.only)

    def measure(self, case: Case) -> Row:
        """Measure one case.

        Raises:
            Refused: If a backend does not support it.
        """
        inputs = self._inputs_of(case)
        kind, _, name = case.implementation.partition(", ")
        args = self.args
        latents = (args.kv_lora_rank + args.qk_pos_emb_head_dim) * self.dtype.itemsize
        if kind == "dense":
            [times] = self._times(self._dense(name, case, inputs))
            return Row(
                case=case,
                times=times,
                more={"bound_us": self._bound(case.batch * case.kv * latents)},
            )
        if kind == "FlashMLA":
            return self._flash_mla(case, inputs, case.batch * args.topk * latents)
        select, attend = self._sparse(name, case, inputs)
        chosen = select()
        difference = self._difference(attend(chosen), inputs, chosen)
        both, selecting, attending = self._times(
            lambda: attend(select()), select, lambda: attend(chosen)
        )
        read = case.kv * args.indexer_dim * self.dtype.itemsize + args.topk * latents
        more = {
            "select_us": selecting.median * 1e6,
            "attend_us": attending.median * 1e6,
            "bound_us": self._bound(case.batch * read),
            "difference": difference,
            "agreement": self._agreement(inputs, chosen, case.kv),
        }
        return Row(case=case, times=both, more=more)

    def _flash_mla(self, case: Case, inputs: _Inputs, read: int) -> Row:
        """Its sparse prefill: the tokens of all requests over the places of their chosen keys."""
        import torch

        from absorbed_mla.dsa.cached_keys import CachedRows
        from benchmarks.peers.sparse import flash_mla

        if not self.on_gpu:
            raise Refused("it needs a GPU")
        chosen = self._sparse("triton", case, inputs)[0]()
        cached = CachedRows(inputs.latents)
        slots = cached.slots(chosen, inputs.rows.block_table)
        query = torch.cat((inputs.q_content, inputs.q_rope), dim=-1)
        attend = flash_mla(query, cached.rows.squeeze(1), slots, inputs.scale)
        difference = self._difference(attend(), inputs, chosen)
        [times] = self._times(attend)
        more = {"attend_us": times.median * 1e6, "bound_us": self._bound(read)}
        return Row(case=case, times=times, more=more | {"difference": difference})

    def _bound(self, read: int) -> float:
        """Microseconds to read so many bytes: a copy's rate counts what is read and written."""
        return read / (self._copy_tbps * 1e12) * 1e6

    def _times(self, *calls: Callable[[], Any]) -> list[Times]:
        """Of each call, in turns."""
        from benchmarks.kit.timing import Repeated, in_turns, repetitions

        works = []
        for call in calls:
            call()  # compiles
            run = self._graph(call) if self.on_gpu else call
            works.append(Repeated(run, finish=self._flushed.zero_, on_gpu=self.on_gpu))
        seconds = [max(work.once() for work in works) for _ in range(2)][-1]
        found = in_turns(works, repetitions(seconds, self.args.seconds_per_row))
        return [Times.of([step for _, _, step in steps]) for steps in found]

    def _graph(self, call: Callable[[], Any]) -> Callable[[], None]:
        import torch

        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def _dense(self, name: str, case: Case, inputs: _Inputs) -> Callable[[], Tensor]:
        from absorbed_mla.inference.backend import PagedRequest, choose

        args = self.args
        request = PagedRequest(
            self.device,
            self.dtype,
            case.heads,
            args.kv_lora_rank,
            args.qk_pos_emb_head_dim,
            args.block_size,
        )
        try:
            backend = choose(name, request)
        except ValueError as error:
            raise Refused(str(error)) from None
        operands = inputs.q_content, inputs.q_rope, inputs.latents, inputs.rows, inputs.scale
        return lambda: backend.forward(*operands)[0]

    def _sparse(
        self, name: str, case: Case, inputs: _Inputs
    ) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
        """What chooses keys [T, topk] of the requests, and what attends to them."""
        from absorbed_mla.dsa.backend import SparseRequest, choose_implementation
        from absorbed_mla.registry import INDEXER_BACKENDS, SPARSE_BACKENDS

        args = self.args
        request = SparseRequest(
            device=self.device,
            dtype=self.dtype,
            heads=case.heads,
            kv_lora_rank=args.kv_lora_rank,
            rope_dim=args.qk_pos_emb_head_dim,
            index_heads=args.indexer_heads,
            index_dim=args.indexer_dim,
            topk=args.topk,
            relu=True,
            deterministic=False,
        )
        try:
            sparse = choose_implementation(SPARSE_BACKENDS, name, request)
            indexer = choose_implementation(INDEXER_BACKENDS, "triton", request)
        except ValueError as error:
            raise Refused(str(error)) from None
        index = inputs.index_query, inputs.index_weights, inputs.index_keys, inputs.rows

        operands = inputs.q_content, inputs.q_rope, inputs.latents, inputs.rows

        def attend(chosen: Tensor) -> Tensor:
            return sparse.forward_cached(*operands, chosen, inputs.scale).out

        return partial(indexer.select_cached, *index, args.topk, relu=True), attend

    def _difference(self, out: Tensor, inputs: _Inputs, chosen: Tensor) -> float:
        """Relative, from the reference's output over the same keys in fp32."""
        from absorbed_mla.registry import SPARSE_BACKENDS

        reference = SPARSE_BACKENDS["reference"]
        # Taken keys are converted, not the whole cache.
        operands = inputs.q_content.float(), inputs.q_rope.float(), inputs.latents, inputs.rows
        expected = reference.forward_cached(*operands, chosen, inputs.scale).out
        return float((out.float() - expected).norm() / expected.norm())

    def _agreement(self, inputs: _Inputs, chosen: Tensor, kv: int) -> float:
        """Of the first request, with scores in fp32."""
        blocks = inputs.rows.block_table[0].long()
        keys = inputs.index_keys[blocks].flatten(0, 1)[:kv].float()
        products = (inputs.index_query[0].float() @ keys.T).relu()
        best = (inputs.index_weights[0] @ products).topk(min(self.args.topk, kv)).indices
        own = chosen[0][chosen[0] >= 0].long()
        return len(set(own.tolist()) & set(best.tolist())) / len(best)

    def _inputs_of(self, case: Case) -> _Inputs:
        key = case.heads, case.batch, case.kv
        if self._inputs is None or self._inputs[0] != key:
            self._inputs = None
            self._inputs = key, self._new_inputs(case)
        return self._inputs[1]

    def _new_inputs(self, case: Case) -> _Inputs:
        import torch

        from absorbed_mla.inference.rows import Rows

        args = self.args
        make = torch.Generator(self.device).manual_seed(args.seed)
        random = partial(torch.randn, device=self.device, dtype=self.dtype, generator=make)
        blocks = -(-case.kv // args.block_size)
        order = torch.randperm(case.batch * blocks, device=self.device, generator=make)
        table = order.int().view(case.batch, blocks)
        content, rope = args.kv_lora_rank, args.qk_pos_emb_head_dim
        return _Inputs(
            random(case.batch, case.heads, content),
            random(case.batch, case.heads, rope),
            random(len(order), args.block_size, content + rope),
            random(case.batch, args.indexer_heads, args.indexer_dim),
            random(case.batch, args.indexer_heads).float(),
            random(len(order), args.block_size, args.indexer_dim),
            Rows.of([1] * case.batch, [case.kv] * case.batch, table),
            (content + rope) ** -0.5,
        )


@dataclass(frozen=True)
class _Inputs:
    """Queries [T, N, C] and [T, N, R], caches [blocks, block_size, width], and the indexer's.

    Index queries are [T, Hi, Di] and weights [T, Hi].
    """

    q_content: Tensor
    q_rope: Tensor
    latents: Tensor
    index_query: Tensor
    index_weights: Tensor
    index_keys: Tensor
    rows: Any
    scale: float


if __name__ == "__main__":
    leave(DSADecodeBenchmark.main())
