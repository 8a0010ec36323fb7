#!/usr/bin/env python3
"""Measure decode with DeepSeek Sparse Attention beside dense decode: one new token per request.

    $ python scripts/benchmarks/dsa_decode.py --json docs/measurements/dsa/decode.json
    $ python scripts/benchmarks/dsa_decode.py --heads 16 --kv 8k --only sparse
    $ python scripts/benchmarks/dsa_decode.py --render docs/measurements/dsa/decode.json

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
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit
from benchmarks.dsa import WIDTHS
from benchmarks.peers.sparse import flash_mla

if TYPE_CHECKING:
    from torch import Tensor

torch: Any = kit.lazy("torch")
IMPLEMENTATIONS = ("sparse, hopper", "sparse, triton", "FlashMLA", "dense, hopper", "dense, triton")


@dataclass(frozen=True)
class DecodeCase(kit.Case):
    """Requests of one length, and whose attention."""

    text = "{implementation} n={heads} b={batch} kv={kv}"
    implementation: str  # one of IMPLEMENTATIONS
    heads: int  # of one rank
    batch: int  # requests
    kv: int  # keys of each, the new token's included


Row = kit.row_of(DecodeCase, kit.TimedRow)


class DSADecodeReport(kit.Report):
    """One run."""

    row = Row

    def figures(self, row: Row) -> dict[str, float]:
        """Microseconds of the call and of its parts."""
        assert row.times is not None
        return {"us": round(row.times.median * 1e6, 2), **row.more}

    @classmethod
    def panels(cls, reports: Sequence[DSADecodeReport]) -> list[kit.Panel]:
        """Microseconds over the length."""
        return cls.over(reports, "n={0.heads} b={0.batch} [us]", "us", "kv", "keys")


@dataclass(frozen=True)
class _Inputs:
    """Of T tokens, one of each request; caches are [blocks, block_size, width]."""

    q_content: Tensor  # [T, N, C]
    q_rope: Tensor  # [T, N, R]
    latents: Tensor
    index_query: Tensor  # [T, Hi, Di]
    index_weights: Tensor  # [T, Hi] fp32
    index_keys: Tensor
    rows: Any
    scale: float

    @property
    def operands(self) -> tuple:
        """Of attention over the cache."""
        return self.q_content, self.q_rope, self.latents, self.rows


class DSADecodeBenchmark(kit.Benchmark):
    """Sparse and dense decode over the same cache."""

    report = DSADecodeReport
    options = kit.declare(
        "json plot render only device heads=128,16 seconds_per_row=0.03 time_limit=80 seed=1234",
        batches=kit.sizes("requests", "32"),
        kv=kit.sizes("keys of each request", "4k,8k,32k,128k"),
        topk=kit.number("keys that a query attends to", 2048),
        indexer_heads=kit.number("heads of the indexer", 64),
        indexer_dim=kit.number("width of one of them", 128),
        block_size=kit.number("tokens of a cache block", 64),
        dims=WIDTHS,
    )
    quick = "--batches 1 --kv 24 --topk 8 --indexer-heads 2 --indexer-dim 16 --block-size 16"
    recorded = ("topk", "block_size", "ceilings")

    def prepare(self) -> None:
        """Of one device; a CPU interprets Triton's kernels."""
        from benchmarks.kit.timing import flush_l2

        self.interpret_on_cpu()
        self.use_one_device()
        self._flush = flush_l2(self.device)
        self._last: tuple[tuple, _Inputs] | None = None

    def about(self) -> dict:
        """With the widths."""
        args = self.args
        found = super().about()
        self._copy_tbps = found["ceilings"]["copy_tbps"]
        widths = {"widths": [args.kv_lora_rank, args.qk_pos_emb_head_dim]}
        return found | widths | {"indexer": [args.indexer_heads, args.indexer_dim]}

    def cases(self) -> list[DecodeCase]:
        """Implementations beside each other, short requests first."""
        args = self.args
        inputs = product(sorted(args.kv), sorted(args.batches), args.heads)
        return [
            DecodeCase(implementation, heads, batch, kv)
            for kv, batch, heads in inputs
            for implementation in IMPLEMENTATIONS
        ]

    def measure(self, case: DecodeCase) -> Row:
        """Measure one case.

        Raises:
            Refused: If a backend does not support it.
        """
        if self._last is None or self._last[0] != case.input:
            self._last = None
            self._last = case.input, self._inputs(case)
        inputs, args = self._last[1], self.args
        kind, _, name = case.implementation.partition(", ")
        latents = (args.kv_lora_rank + args.qk_pos_emb_head_dim) * self.dtype.itemsize
        if kind == "dense":
            [times] = self._times(self._dense(name, case, inputs))
            more = {"bound_us": self._bound(case.batch * case.kv * latents)}
            return Row(case=case, times=times, more=more)
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

    def _flash_mla(self, case: DecodeCase, inputs: _Inputs, read: int) -> Row:
        """Its sparse prefill: the tokens of all requests over the places of their chosen keys."""
        from absorbed_mla.dsa.cached_keys import CachedRows

        if not self.on_gpu:
            raise kit.Refused("it needs a GPU")
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

    def _times(self, *calls: Callable[[], Any]) -> list[kit.Times]:
        """Of each call, in turns."""
        from benchmarks.kit.timing import Repeated, graphed, in_turns, repetitions

        works = []
        for call in calls:
            call()  # compiles
            run = graphed(call) if self.on_gpu else call
            works.append(Repeated(run, finish=self._flush, on_gpu=self.on_gpu))
        seconds = [max(work.once() for work in works) for _ in range(2)][-1]
        found = in_turns(works, repetitions(seconds, self.args.seconds_per_row))
        return [kit.Times.of([step for _, _, step in steps]) for steps in found]

    def _dense(self, name: str, case: DecodeCase, inputs: _Inputs) -> Callable[[], Tensor]:
        from absorbed_mla.inference.backend import PagedRequest, choose

        args = self.args
        widths = args.kv_lora_rank, args.qk_pos_emb_head_dim, args.block_size
        request = PagedRequest(self.device, self.dtype, case.heads, *widths)
        with kit.refusing(ValueError):
            backend = choose(name, request)
        return lambda: backend.forward(*inputs.operands, inputs.scale)[0]

    def _sparse(
        self, name: str, case: DecodeCase, inputs: _Inputs
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
        with kit.refusing(ValueError):
            sparse = choose_implementation(SPARSE_BACKENDS, name, request)
            indexer = choose_implementation(INDEXER_BACKENDS, "triton", request)
        index = inputs.index_query, inputs.index_weights, inputs.index_keys, inputs.rows

        def attend(chosen: Tensor) -> Tensor:
            return sparse.forward_cached(*inputs.operands, chosen, inputs.scale).out

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

    def _inputs(self, case: DecodeCase) -> _Inputs:
        from absorbed_mla.inference.rows import Rows

        args, (make, random) = self.args, self.randoms()
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


if __name__ == "__main__":
    kit.main(DSADecodeBenchmark)
