#!/usr/bin/env python3
"""Measure attention over cached latents on one device: chunked prefill, and offloaded contexts.

    $ python scripts/benchmarks/cached_attention.py docs/measurements/inference
    $ python scripts/benchmarks/cached_attention.py /tmp/quick --suites offload --heads 16 \
          --contexts 32k
    $ python scripts/benchmarks/cached_attention.py docs/measurements/inference --render cached.json

Suite "prefill": some hundreds or thousands of new tokens over a long context, whose keys and values
are expanded in chunks, beside attention alone over keys and values that are expanded already. One
request with q new tokens and k = context + q keys counts

    pairs     = q * k - q * (q - 1) / 2                           causal inside the new tokens
    attention = heads * pairs * 2 * (nope + rope + v) FLOP
    expansion = heads * k * 2 * kv_lora_rank * (nope + v) FLOP

and the ratio is (attention + expansion) per second of ours over attention per second alone.
Suite "offload": one decoded token of each request, with a part of the cache in pinned host memory,
beside a cache that is all on the device, and beside the time that the link between host and device
needs for the bytes, (offloaded keys) * (kv_lora_rank + rope) * width.

The dimensions are DeepSeek-V3's; a GPU computes in bfloat16, a CPU in float32 (to try the script).
Output:

    3.1 s  prefill n=16 b=1 q=512 context=32768: attention 310, whole 420, bare 480, ratio 0.88
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit

if TYPE_CHECKING:
    from torch import Tensor

torch: Any = kit.lazy("torch")
SUITES = ("prefill", "offload")
PREFILL_TARGET = 0.85
# Of an offloaded context, cached tokens for each one that stays on the device.
BUDGET_RATIO = 4
SCALE = 0.1
FILL_TOKENS = 8192
LINK_BYTES = 2**28
# Titles of the plot.
_PREFILL = "prefill: TFLOP/s of attention alone"
_OFFLOAD = "offload: added time of the link's"


@dataclass(frozen=True)
class CachedCase(kit.Case):
    """One step over a cache."""

    text = "{suite} n={heads} b={batch} q={queries} context={context}{resident:? resident=%s}"
    suite: str  # "prefill" or "offload"
    heads: int  # of the rank
    batch: int  # requests
    queries: int  # new tokens of each
    context: int  # cached tokens of each
    resident: int | None = None  # positions that stay on the device; None for all

    @property
    def keys(self) -> int:
        """Keys of a request."""
        return self.context + self.queries

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it attends to, of all requests and one head."""
        return self.batch * (self.queries * self.keys - self.queries * (self.queries - 1) // 2)


def flops(case: CachedCase, dims: dict[str, int]) -> dict[str, int]:
    """Floating-point operations of the attention in the expanded form, and of the expansion."""
    nope, rope, v = (dims[f"{name}-head-dim"] for name in ("qk", "qk-pos-emb", "v"))
    return {
        "attention": 2 * case.heads * case.pairs * (nope + rope + v),
        "expansion": 2 * case.batch * case.keys * case.heads * dims["kv-lora-rank"] * (nope + v),
    }


def offloaded_bytes(case: CachedCase, dims: dict[str, int], itemsize: int) -> int:
    """What one step copies from host memory."""
    width = dims["kv-lora-rank"] + dims["qk-pos-emb-head-dim"]
    behind = 0 if case.resident is None else max(0, case.keys - case.resident)
    return case.batch * behind * width * itemsize


@dataclass(frozen=True, kw_only=True)
class Row(kit.Row):
    """What was measured of one case."""

    case: CachedCase
    ours: kit.Times | None = None  # time of a step
    # Time of attention alone (prefill), or of the step with everything on the device (offload).
    beside: kit.Times | None = None
    # The most allocated on the device during a step; None without a GPU.
    peak_bytes: int | None = None


class CachedReport(kit.Report):
    """One run; ``environment["link"]`` is in bytes per second."""

    row = Row

    def figures(self, row: Row) -> dict[str, float]:
        """Rates in TFLOP/s (prefill), or what offloading adds and what the link needs (offload)."""
        assert row.ours is not None and row.beside is not None
        dims, duration = self.environment["dims"], row.ours.median
        if row.case.suite == "prefill":
            count = flops(row.case, dims)
            bare = count["attention"] / row.beside.median / 1e12
            whole = sum(count.values()) / duration / 1e12
            rate = count["attention"] / duration / 1e12
            return {
                "ms": 1e3 * duration,
                "attention": rate,
                "whole": whole,
                "bare": bare,
                "ratio": whole / bare,
            }
        moved = offloaded_bytes(row.case, dims, self.environment["itemsize"])
        more = duration - row.beside.median
        return {
            "ms": 1e3 * duration,
            "more_ms": 1e3 * more,
            "link_ms": 1e3 * moved / self.environment["link"],
        }

    @classmethod
    def panels(cls, reports: Sequence[CachedReport]) -> list[kit.Panel]:
        """Rates over those of attention alone, and what offloading adds over the link's time."""
        prefill, offload = [], []
        for report in reports:
            for row in report.measured:
                case, figures = row.case, report.figures(row)
                if case.suite == "prefill":
                    name = f"{case.heads} heads, {case.queries} new"
                    prefill.append((_PREFILL, name, case.context, figures["ratio"]))
                else:
                    name = f"{case.heads} heads, batch {case.batch}"
                    added = figures["more_ms"] / figures["link_ms"]
                    offload.append((_OFFLOAD, name, case.context, added))
        return [
            *kit.collected(prefill, "context", levels={"target": PREFILL_TARGET}),
            *kit.collected(offload, "context", levels={"the link's": 1.0}),
        ]


class CachedBenchmark(kit.Benchmark):
    """Steps over a filled cache, on one device."""

    files = "cached"
    report = CachedReport
    options = kit.declare(
        "folder render only device heads=128,16 seconds_per_row=0.3 seed=1234",
        suites=kit.some(
            "what to measure: chunked prefill, decode with a partly offloaded cache", SUITES
        ),
        contexts=kit.sizes("cached tokens of each request", "32k,128k"),
        queries=kit.sizes("new tokens of a prefill", "512,2k,8k"),
        batches=kit.sizes("requests that decode together", "1,8"),
        context_chunk_size=kit.Option("context_chunk_size of the attention", int, 2**16),
        dims=kit.DIMS,
    )
    quick = "--contexts 24 --queries 6 --batches 2 --context-chunk-size 8"
    recorded = ("dims",)

    def prepare(self) -> None:
        """Of one device."""
        from absorbed_mla import AbsorbedMLAOptions

        self.use_one_device()
        self._random = self.processes.random
        self.dims = kit.dims_of(self.args)
        self.options_of_attention = AbsorbedMLAOptions(
            context_chunk_size=self.args.context_chunk_size
        )

    def about(self) -> dict:
        """With the rate of the link, in bytes per second."""
        link = self.link_bytes_per_second()
        return super().about() | {"itemsize": self.dtype.itemsize, "link": link}

    def cases(self) -> list[CachedCase]:
        """By heads, suite and size."""
        args, found = self.args, []
        for heads in args.heads:
            if "prefill" in args.suites:
                for context in args.contexts:
                    found += [CachedCase("prefill", heads, 1, new, context) for new in args.queries]
            if "offload" in args.suites:
                for batch in args.batches:
                    for context in args.contexts:
                        resident = max(1, (context + 1) // BUDGET_RATIO)
                        found.append(CachedCase("offload", heads, batch, 1, context, resident))
        return found

    def measure(self, case: CachedCase) -> Row:
        """Times of the step and of what it is compared with."""
        with torch.no_grad():
            ours, peak = self._times(self._step(case))
            if case.suite == "prefill":
                beside = self._attention_alone(case)
            else:
                beside = self._step(replace(case, resident=None))
            return Row(case=case, ours=ours, beside=self._times(beside)[0], peak_bytes=peak)

    def link_bytes_per_second(self) -> float:
        """From pinned host memory to the device."""
        size = LINK_BYTES if self.on_gpu else 2**20
        source = torch.empty(size, dtype=torch.uint8, pin_memory=self.on_gpu)
        target = torch.empty(size, dtype=torch.uint8, device=self.device)
        times, _ = self._times(lambda: target.copy_(source, non_blocking=True))
        return size / times.median

    def _step(self, case: CachedCase) -> Callable[[], Tensor]:
        """A forward of the attention over a cache that is filled."""
        from megatron.core.inference.contexts import StaticInferenceContext

        from absorbed_mla.dims import MLADims
        from absorbed_mla.inference.attention import CachedAttention

        dims = MLADims(
            hidden_size=self.dims["hidden-size"],
            num_heads=case.heads,
            num_heads_per_rank=case.heads,
            q_lora_rank=None,
            kv_lora_rank=self.dims["kv-lora-rank"],
            qk_nope_head_dim=self.dims["qk-head-dim"],
            qk_rope_head_dim=self.dims["qk-pos-emb-head-dim"],
            v_head_dim=self.dims["v-head-dim"],
        )
        options = self.options_of_attention.replace(latent_cache_tokens=case.resident)
        attention = CachedAttention(dims, SCALE, options)
        context = StaticInferenceContext(case.batch, case.keys)
        for first in range(0, case.context, FILL_TOKENS):
            count = min(FILL_TOKENS, case.context - first)
            filled = self._random(count, case.batch, dims.kv_down_dim)
            context.sequence_len_offset = first
            step = attention.open_step(context, 1, lambda: 0, filled)
            step.write(step.pack(filled))
        context.sequence_len_offset = case.context
        kv = self._random(case.queries, case.batch, dims.kv_down_dim)
        q = self._random(case.queries * case.batch, 1, case.heads * dims.qk_head_dim)
        weights = tuple(
            self._random(case.heads, width, dims.kv_lora_rank)
            for width in (dims.qk_nope_head_dim, dims.v_head_dim)
        )
        angles = torch.rand(len(q), dims.qk_rope_head_dim // 2, device=self.device)
        cos_sin = (angles.cos(), angles.sin())

        def run() -> Tensor:
            step = attention.open_step(context, 1, lambda: 0, kv)
            packed = step.pack(kv)
            step.write(packed)
            return attention(step, q, packed, weights, cos_sin)

        return run

    def _attention_alone(self, case: CachedCase) -> Callable[[], object]:
        """Attention over keys and values of every head that are in memory."""
        from absorbed_mla.core_attention.backend import AttentionRequest
        from absorbed_mla.core_attention.cost import machine_name, rates_on
        from absorbed_mla.core_attention.masks.scores import ScoreRules
        from absorbed_mla.core_attention.masks.spans import Span
        from absorbed_mla.core_attention.types import AttentionInputs
        from absorbed_mla.registry import ATTENTION_BACKENDS

        key = self.dims["qk-head-dim"] + self.dims["qk-pos-emb-head-dim"]
        value = self.dims["v-head-dim"]
        request = AttentionRequest(
            form="expanded",
            device=self.device,
            dtype=self.dtype,
            key_width=key,
            value_width=value,
            masked=False,
            dropout=False,
        )
        asked, machine = self.options_of_attention.core_attention_backend, machine_name(self.device)
        runnable, _ = ATTENTION_BACKENDS.examine(asked, request)
        backend = max(runnable, key=lambda entry: rates_on(machine, entry)[0])
        q = self._random(case.queries, 1, case.heads, key)
        k = self._random(case.keys, 1, case.heads, key)
        v = self._random(case.keys, 1, case.heads, value)
        span = Span(0, case.queries, 0, case.keys, causal_offset=case.context)
        rules = ScoreRules(scale=SCALE, spans=(span,))
        inputs = AttentionInputs.multi_head(q, k, v)
        return lambda: backend.forward(inputs, rules)

    def _times(self, run: Callable[[], object]) -> tuple[kit.Times, int | None]:
        """Of repetitions after one that compiles, and peak memory of one."""
        from benchmarks.kit.timing import Repeated

        run()
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if self.on_gpu else 0
        begin = time.perf_counter()
        run()
        if self.on_gpu:
            torch.cuda.synchronize()
        duration = time.perf_counter() - begin
        peak = torch.cuda.max_memory_allocated() - before if self.on_gpu else None
        return Repeated(run, on_gpu=self.on_gpu).times(duration, self.args.seconds_per_row)[0], peak


if __name__ == "__main__":
    kit.main(CachedBenchmark)
