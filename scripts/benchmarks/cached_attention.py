#!/usr/bin/env python3
"""Measure attention over cached latents on one device: chunked prefill, and offloaded contexts.

    $ python scripts/benchmarks/cached_attention.py docs/inference
    $ python scripts/benchmarks/cached_attention.py /tmp/quick --suites offload --heads 16 \
          --contexts 32k
    $ python scripts/benchmarks/cached_attention.py docs/inference --render cached.json

Suite "prefill": some hundreds or thousands of new tokens over a long context, whose keys and values
are expanded in chunks, beside attention alone over keys and values that are there. Counted are, of
one request with q new tokens and k = context + q keys,

    pairs     = q * k - q * (q - 1) / 2                           causal inside the new tokens
    attention = heads * pairs * 2 * (nope + rope + v) FLOP
    expansion = heads * k * 2 * kv_lora_rank * (nope + v) FLOP

and the ratio is (attention + expansion) per second of ours over attention per second alone.
Suite "offload": one decoded token of each request, a part of the context in pinned host memory,
beside all of it on the device and beside the time that the link needs for the bytes, (keys behind
the resident ones) * (kv_lora_rank + rope) * width.

The dimensions are DeepSeek-V3's; a GPU computes in bfloat16, a CPU in float32 (to try the script).
A case that fails has its error in its row. Output:

    prefill n=16 b=1 q=512 context=32768: attention 310, whole 420, bare 480, ratio 0.88

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.kit import arguments, provenance
from benchmarks.kit.arguments import DIMS, dims_of, list_of, one_of, parse_sizes, seconds
from benchmarks.kit.plot import Panel, collected
from benchmarks.kit.report import Report, Results, Times, reason
from console.parser import Parser
from console.script import leave, run_script

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from absorbed_mla import AbsorbedMLAOptions

NAME = "cached"
SUITES = ("prefill", "offload")
PREFILL_TARGET = 0.85
SCALE = 0.1
FILL_TOKENS = 8192
LINK_BYTES = 2**28

# ---- cases


@dataclass(frozen=True)
class Case:
    """One step over a cache.

    Attributes:
        suite: ``"prefill"`` or ``"offload"``.
        heads: Of the rank.
        batch: Requests.
        queries: New tokens of each.
        context: Cached tokens of each.
        resident: Positions that stay on the device; None for all.
    """

    suite: str
    heads: int
    batch: int
    queries: int
    context: int
    resident: int | None = None

    @property
    def keys(self) -> int:
        """Keys of a request."""
        return self.context + self.queries

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, of all requests and one head."""
        return self.batch * (self.queries * self.keys - self.queries * (self.queries - 1) // 2)

    def __str__(self) -> str:
        size = f"n={self.heads} b={self.batch} q={self.queries} context={self.context}"
        return f"{self.suite} {size}" + (f" resident={self.resident}" if self.resident else "")


def cases(args: argparse.Namespace) -> list[Case]:
    """What the command line asks for."""
    return arguments.chosen(_cases(args), args.only)


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    for heads in args.heads:
        if "prefill" in args.suites:
            for context in args.contexts:
                for queries in args.queries:
                    yield Case("prefill", heads, 1, queries, context)
        if "offload" in args.suites:
            for batch in args.batches:
                for context in args.contexts:
                    resident = max(1, (context + 1) // args.budget_ratio)
                    yield Case("offload", heads, batch, 1, context, resident)


def flops(case: Case, dims: dict[str, int]) -> dict[str, int]:
    """Floating-point operations of the attention in the expanded form, and of the expansion."""
    nope, rope, v = (dims[f"{name}-head-dim"] for name in ("qk", "qk-pos-emb", "v"))
    return {
        "attention": 2 * case.heads * case.pairs * (nope + rope + v),
        "expansion": 2 * case.batch * case.keys * case.heads * dims["kv-lora-rank"] * (nope + v),
    }


def offloaded_bytes(case: Case, dims: dict[str, int], itemsize: int) -> int:
    """What one step copies from host memory."""
    width = dims["kv-lora-rank"] + dims["qk-pos-emb-head-dim"]
    behind = 0 if case.resident is None else max(0, case.keys - case.resident)
    return case.batch * behind * width * itemsize


# ---- command line


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse ``argv``.

    Raises:
        ValueError: After wrong input.
    """
    parser = Parser("cached_attention.py", __doc__)
    add = parser.add_argument
    arguments.add_folder(parser, "cached.json and .png")
    add("--suites", type=list_of(one_of(SUITES)), default=",".join(SUITES), help="what is measured")
    arguments.add_only(parser)
    arguments.add_device(parser)
    add("--heads", type=parse_sizes, default="128,16", help="of the attention")
    add("--contexts", type=parse_sizes, default="32k,128k", help="cached tokens")
    add("--queries", type=parse_sizes, default="512,2k,8k", help="new tokens")
    add("--batches", type=parse_sizes, default="1,8", help="requests that decode")
    add("--budget-ratio", type=int, default=4, help="context over what is resident")
    add("--context-chunk-size", type=int, default=2**16, help="of the attention")
    add("--seconds-per-row", type=seconds, default=0.3, help="of repetitions")
    arguments.add_seed(parser, "weights and inputs")
    arguments.add_dims(parser, DIMS)
    args = parser.parse_args(argv)
    if args.budget_ratio < 2:
        parser.error(f"--budget-ratio must be at least 2, got {args.budget_ratio}")
    arguments.check_files(args.folder, args.render)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or render what was measured; returns the exit code, 2 after wrong input."""
    return run_script("cached_attention.py", lambda: _run(parse_arguments(argv)))


def _run(args: argparse.Namespace) -> None:
    if args.render:
        results(CachedReport.show_again(args.render)).publish(args.folder, NAME)
    else:
        measure_all(args)


def measure_all(args: argparse.Namespace) -> None:
    """Measure every case, write the results after each, and render.

    Raises:
        ValueError: If the device is not there.
    """
    # Only here, so that --help and --render need no torch.
    import torch

    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    from absorbed_mla import AbsorbedMLAOptions

    device = torch.device(arguments.use_device(args.device))
    torch.manual_seed(args.seed)
    options = AbsorbedMLAOptions(context_chunk_size=args.context_chunk_size)
    bench = Bench(dims_of(args), device, args.seconds_per_row, options)
    environment = provenance.describe(
        bench.on_gpu,
        bench.dtype,
        itemsize=bench.dtype.itemsize,
        dims=dims_of(args),
        link=bench.link_bytes_per_second(),
    )
    report = CachedReport(environment)
    for case in cases(args):
        report.rows.append(bench.measure(case))
        report.write(args.folder / f"{NAME}.json")
        print(report.line(report.rows[-1]), flush=True)
    results([report]).publish(args.folder, NAME)


# ---- measuring


@dataclass(frozen=True)
class Row:
    """What was measured of one case.

    Attributes:
        case: What.
        ours: Time of a step.
        beside: Time of attention alone (prefill), or of the step with everything on the device
            (offload).
        peak_bytes: The most allocated on the device during a step; None without a GPU.
        error: Empty, or why figures are missing.
    """

    case: Case
    ours: Times | None = None
    beside: Times | None = None
    peak_bytes: int | None = None
    error: str = ""


class Bench:
    """Measures cases on one device.

    Args:
        dims: By the names of ``DIMS``.
        device: A GPU computes in bfloat16, a CPU in float32.
        seconds: For the repetitions of a case.
        options: Of the attention.
    """

    def __init__(
        self,
        dims: dict[str, int],
        device: torch.device,
        seconds: float,
        options: AbsorbedMLAOptions,
    ) -> None:
        import torch

        self.dims, self.device, self.seconds, self.options = dims, device, seconds, options
        self.on_gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32

    def measure(self, case: Case) -> Row:
        """Measure one case; what it raises is in its row."""
        import torch

        try:
            with torch.no_grad():
                ours, peak = self._times(self._step(case))
                bare = self._step(replace(case, resident=None))
                if case.suite == "prefill":
                    bare = self._attention_alone(case)
                return Row(case, ours, self._times(bare)[0], peak)
        except (RuntimeError, ValueError) as error:
            return Row(case, error=reason(error))
        finally:
            if self.on_gpu:
                torch.cuda.empty_cache()

    def link_bytes_per_second(self) -> float:
        """From pinned host memory to the device."""
        import torch

        size = LINK_BYTES if self.on_gpu else 2**20
        source = torch.empty(size, dtype=torch.uint8, pin_memory=self.on_gpu)
        target = torch.empty(size, dtype=torch.uint8, device=self.device)
        times, _ = self._times(lambda: target.copy_(source, non_blocking=True))
        return size / times.median

    def _random(self, *shape: int) -> Tensor:
        import torch

        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def _step(self, case: Case) -> Callable[[], Tensor]:
        """A forward of the attention over a cache that is filled."""
        import torch
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
        options = self.options.replace(latent_cache_tokens=case.resident)
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

    def _attention_alone(self, case: Case) -> Callable[[], object]:
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
        asked, machine = self.options.core_attention_backend, machine_name(self.device)
        runnable, _ = ATTENTION_BACKENDS.examine(asked, request)
        backend = max(runnable, key=lambda entry: rates_on(machine, entry)[0])
        q = self._random(case.queries, 1, case.heads, key)
        k = self._random(case.keys, 1, case.heads, key)
        v = self._random(case.keys, 1, case.heads, value)
        span = Span(0, case.queries, 0, case.keys, causal_offset=case.context)
        rules = ScoreRules(scale=SCALE, spans=(span,))
        inputs = AttentionInputs.multi_head(q, k, v)
        return lambda: backend.forward(inputs, rules)

    def _times(self, run: Callable[[], object]) -> tuple[Times, int | None]:
        """Of repetitions after one that compiles, and peak memory of one."""
        import torch

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
        return Repeated(run, on_gpu=self.on_gpu).times(duration, self.seconds)[0], peak


# ---- report


class CachedReport(Report):
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


def results(reports: Sequence[CachedReport]) -> Results:
    """Everything that is shown."""
    return Results(reports, panels(reports))


def _measured(
    reports: Sequence[CachedReport], suite: str
) -> Iterator[tuple[Row, dict[str, float]]]:
    for report in reports:
        for row in report.measured:
            if row.case.suite == suite:
                yield row, report.figures(row)


def panels(reports: Sequence[CachedReport]) -> list[Panel]:
    """Rates over those of attention alone, and what offloading adds over the link's time."""
    prefill = (
        ("prefill: TFLOP/s of attention alone", f"{c.heads} heads, {c.queries} new", c.context, x)
        for row, figures in _measured(reports, "prefill")
        for c, x in ((row.case, figures["ratio"]),)
    )
    offload = (
        ("offload: added time of the link's", f"{c.heads} heads, batch {c.batch}", c.context, x)
        for row, figures in _measured(reports, "offload")
        for c, x in ((row.case, figures["more_ms"] / figures["link_ms"]),)
    )
    return [
        *collected(prefill, "context", levels={"target": PREFILL_TARGET}),
        *collected(offload, "context", levels={"the link's": 1.0}),
    ]


if __name__ == "__main__":
    leave(main())
