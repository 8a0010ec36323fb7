#!/usr/bin/env python3
"""Generate many requests with Megatron's dynamic engine: are the tokens right, and how fast?

    $ python scripts/benchmarks/engine.py --json engine.json
    $ python scripts/benchmarks/engine.py --batch-invariant --implementations ours
    $ NVIDIA_TF32_OVERRIDE=0 python scripts/benchmarks/engine.py --dtype float32 --num-layers 2 \
          --heads 16 --requests 100

A model of random weights gets requests of mixed lengths at once, half of them with a beginning
that others share, in a cache that is too small for them: with prefix caching, chunked prefill,
preemption, and in half of the cases CUDA graphs. Our attention runs beside Megatron's standard MLA
in the same engine; where it cannot run, its row has the error. The rate is generated
tokens over the seconds from the first request to the end of the last, after some requests that
compile the kernels. Then it checks that no block of the cache is lost, that all of prefix caching,
chunked prefill and so on has happened, and that every request has the tokens that it has alone in
an eager engine. In bfloat16, results of different batch sizes are rounded differently: where the
tokens differ, a whole forward must give both tokens a log-probability within 0.1 (float32: 1e-3) of
the likeliest ("ties"); with --batch-invariant they must not differ. On a CPU (to try the script)
CUDA graphs are the host's bookkeeping only. Output:

    30.1 s  ours, eager: tokens_per_second 2100, steps 310, mixed_steps 120, ..., same 200, ties 0

The exit code is 1 if ours is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit
from benchmarks.engine_requests import (
    Comparison,
    Request,
    compare,
    longest,
    scarce_blocks,
    workload,
)
from benchmarks.kit.arguments import count_or_none
from benchmarks.kit.generating import GeneratingBenchmark
from console.parser import Parser

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from absorbed_mla.serving.engine import Engine
    from absorbed_mla.serving.request_results import Result
    from absorbed_mla.serving.statistics import Statistics

torch: Any = kit.lazy("torch")
IMPLEMENTATIONS = ("ours", "standard")
# Requests that run first, so that kernels are compiled when the clock starts.
WARM_UP = 8
# Differences of log-probabilities up to which either of two tokens may be chosen.
TIES = {"float32": 1e-3, "bfloat16": 0.1}


@dataclass(frozen=True)
class EngineCase(kit.Case):
    """One way of running all requests."""

    text = "{implementation}, {graphs:?CUDA graphs|eager}"
    implementation: str  # "ours" or "standard", Megatron's MLASelfAttention
    graphs: bool  # whether steps are replayed from CUDA graphs
    divided: bool = False  # of former results


class VerdictReport(kit.Report):
    """A report whose rows say whether every token was right."""

    def as_json(self, row: Any) -> dict:
        """With the rate and the verdict."""
        derived = {"tokens_per_second": row.tokens_per_second, "ok": row.ok}
        return {**dataclasses.asdict(row), **derived}

    def summary(self) -> dict:
        """The whole file."""
        return {"environment": self.environment, "rows": list(map(self.as_json, self.rows))}

    def line(self, row: Any) -> str:
        """With what did not happen."""
        missing = f"; did not happen: {', '.join(row.missing)}" if row.missing else ""
        return super().line(row) + missing


@dataclass(frozen=True, kw_only=True)
class Row(kit.Row):
    """All requests in one engine; the error may also be of what it did."""

    case: EngineCase
    seconds: float | None = None  # from the first request to the end of the last
    generated: int = 0  # tokens
    # What the engine did: Run without its results.
    engine: dict[str, int] = field(default_factory=dict)
    # Of what the workload should make the engine do, what did not happen.
    missing: tuple[str, ...] = ()
    capture_seconds: float | None = None  # to make the engine, CUDA graphs included
    peak_bytes: int | None = None  # of device memory, or None
    comparison: Comparison | None = None  # with the tokens that every request has alone, or None

    @property
    def tokens_per_second(self) -> float | None:
        """Generated, over all requests."""
        return self.generated / self.seconds if self.seconds else None

    @property
    def ok(self) -> bool:
        """Whether it ran, was put to the test, and every token is right."""
        different = self.comparison.different if self.comparison else 0
        return not (self.error or self.missing or different)


def tie(args: argparse.Namespace, dtype: torch.dtype) -> float:
    """Log-probability by which a token may be below the likeliest: 0 in parity mode."""
    return 0.0 if args.batch_invariant else TIES[str(dtype).removeprefix("torch.")]


def generate(engine: Engine, requests: Sequence[Request]) -> list[Result]:
    """Run greedy requests together."""
    from absorbed_mla.serving.sampling.parameters import SamplingParams

    return engine.generate(
        [request.prompt for request in requests],
        [SamplingParams(max_tokens=request.num_tokens, temperature=0) for request in requests],
    )


def missing(run: Statistics, case: EngineCase) -> tuple[str, ...]:
    """What should have happened, and did not."""
    wanted = {
        "chunked prefill": run.chunks,
        "a prefix found": run.prefix_blocks,
        "preemption": run.evicted + run.most_paused,
        "mixed steps": run.mixed_steps,
        "graph steps": run.graph_steps or not case.graphs,
    }
    return tuple(name for name, happened in wanted.items() if not happened)


def errors(results: Sequence[Result]) -> str:
    """Error of the first request that could not run; ``""`` if there is none."""
    for number, result in enumerate(results):
        if result.error:
            return f"request {number}: {result.error}"
    return ""


class EngineReport(VerdictReport):
    """One run."""

    row = Row

    def figures(self, row: Row) -> dict[str, float]:
        """The rate, what the engine did, and the comparison."""
        found: dict[str, float] = {"tokens_per_second": row.tokens_per_second or 0.0, **row.engine}
        if row.comparison:
            same = row.comparison
            found |= {"same": same.equal, "ties": same.ties, "different": same.different}
        return found


class EngineBenchmark(GeneratingBenchmark):
    """Cases over the same requests, on one device."""

    report = EngineReport
    options = kit.declare(
        "json render device time_limit=480 seed=1234",
        dtype=kit.one("of the model (default: bfloat16 on a GPU, float32 on a CPU)", tuple(TIES)),
        implementations=kit.some("whose attention to run", IMPLEMENTATIONS),
        batch_invariant=kit.flag("run ours in parity mode, which allows no different tokens"),
        requests=kit.number("number of requests, all sent at once", 200),
        longest_prompt=kit.number("in tokens", 1024),
        shared_prefix=kit.number(
            "tokens at the beginning of every other prompt that are one of four prefixes", 256
        ),
        longest_output=kit.number("in tokens", 128),
        max_requests=kit.number("most requests in one forward", 64),
        max_tokens=kit.number("most tokens in one forward", 1024),
        blocks=kit.number("blocks of 64 tokens in the cache (default: too few for --max-requests)"),
        num_cuda_graphs=kit.Option(
            "batch sizes to capture as CUDA graphs, 0 for none", count_or_none, 16
        ),
        **kit.MODEL,
    )
    quick = (
        "--requests 12 --longest-prompt 160 --shared-prefix 70 --longest-output 40 "
        "--max-requests 8 --max-tokens 128 --num-layers 2 --heads 4 --vocab-size 128"
    )
    recorded = ("dims", "blocks")

    def prepare(self) -> None:
        """The requests, and how large a cache is too small for them."""
        super().prepare()
        args = self.args
        self.requests = workload(args)
        self.dtype = getattr(torch, args.dtype) if args.dtype else self.processes.dtype
        args.blocks = args.blocks or scarce_blocks(self.requests, args.max_requests)
        # Of our attention; its weights are the same in every case.
        self._alone: list[list[int]] | None = None

    @classmethod
    def check(cls, parser: Parser, args: argparse.Namespace) -> None:
        """What Megatron's engine and the workload need."""
        if args.max_tokens % 64:
            parser.error(f"--max-tokens must be a multiple of 64, got {args.max_tokens}")
        if args.max_tokens < args.max_requests:
            parser.error(
                f"--max-tokens must be at least --max-requests={args.max_requests}, "
                f"got {args.max_tokens}"
            )
        if args.shared_prefix >= args.longest_prompt:
            parser.error(
                f"--shared-prefix must be below --longest-prompt={args.longest_prompt}, "
                f"got {args.shared_prefix}"
            )

    def environment(self) -> dict:
        """With the sizes of the workload."""
        return kit.provenance.describe(
            self.processes.on_gpu,
            self.dtype,
            **self.about(),
            requests=len(self.requests),
            prompt_tokens=sum(len(request.prompt) for request in self.requests),
            asked_for=sum(request.num_tokens for request in self.requests),
            versions=kit.provenance.versions(["flash-mla"]),
        )

    def cases(self) -> list[EngineCase]:
        """Eager ones first: an error in a graph may take the device away."""
        ways = (False, True) if self.args.num_cuda_graphs else (False,)
        return [EngineCase(one, graphs) for graphs in ways for one in self.args.implementations]

    def measure(self, case: EngineCase) -> Row:
        """Measure one case."""
        from absorbed_mla.serving.scheduler.cuda_graphs import deleting_graphs

        with deleting_graphs(case.graphs and self.processes.on_gpu), self._mode(case):
            return self._measure(case)

    def _measure(self, case: EngineCase) -> Row:
        from absorbed_mla.serving.engine import Engine
        from absorbed_mla.serving.engine_options import EngineOptions
        from absorbed_mla.serving.scheduler.block_pool import BLOCK_SIZE

        on_gpu = self.processes.on_gpu
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        model = self.model(
            self.args.longest_prompt + self.args.longest_output,
            dtype=self.dtype,
            standard=case.implementation == "standard",
            graphs=case.graphs,
            batch_invariant=self.args.batch_invariant,
        )
        alone = self._each_alone(model) if case.implementation == "ours" else None
        start = self.clock()
        options = EngineOptions(
            cache_tokens=self.args.blocks * BLOCK_SIZE,
            paused_cache_tokens=self.args.blocks // 10 * BLOCK_SIZE,
            num_cuda_graphs=self.args.num_cuda_graphs if case.graphs else None,
            **self._sizes(),
        )
        with Engine(model, options) as engine:
            capture_seconds = self.clock() - start
            generate(engine, self.requests[:WARM_UP])
            start = self.clock()
            results = generate(engine, self.requests)
            seconds = self.clock() - start
            engine.require_no_leak()
        peak_bytes = torch.cuda.max_memory_allocated() if on_gpu else None
        tokens = [result.tokens for result in results]
        comparison = None
        if alone is not None:
            comparison = compare(model, self.requests, tokens, alone, tie(self.args, self.dtype))
        return Row(
            case=case,
            error=errors(results),
            seconds=seconds,
            generated=sum(map(len, tokens)),
            engine=dataclasses.asdict(engine.statistics),
            missing=missing(engine.statistics, case),
            capture_seconds=capture_seconds,
            peak_bytes=peak_bytes,
            comparison=comparison,
        )

    def _mode(self, case: EngineCase) -> contextlib.AbstractContextManager[None]:
        from absorbed_mla.batch_invariant import batch_invariant_mode

        if case.implementation == "ours" and self.args.batch_invariant:
            return batch_invariant_mode()
        return contextlib.nullcontext()

    def _each_alone(self, model: GPTModel) -> list[list[int]]:
        """Tokens of every request in an engine without anything else, eager."""
        from absorbed_mla.serving.engine import Engine
        from absorbed_mla.serving.engine_options import EngineOptions
        from absorbed_mla.serving.scheduler.block_pool import BLOCK_SIZE

        if self._alone is None:
            sizes = self._sizes()
            sizes["step_tokens"] = max(sizes["step_tokens"], sizes["max_sequence_length"])
            options = EngineOptions(
                cache_tokens=self.args.blocks * BLOCK_SIZE,
                chunked_prefill=False,
                prefix_caching=False,
                **sizes,
            )
            with Engine(model, options) as engine:
                self._alone = [generate(engine, [request])[0].tokens for request in self.requests]
        return self._alone

    def _sizes(self) -> dict[str, int]:
        return {
            # Megatron pads to multiples of 64.
            "max_sequence_length": -(-longest(self.requests) // 64) * 64,
            "max_requests": self.args.max_requests,
            "step_tokens": self.args.max_tokens,
        }

    def exit_code(self, report: kit.Report) -> int:
        """1 if ours is wrong."""
        return int(not all(row.ok for row in report.rows if row.case.implementation == "ours"))


if __name__ == "__main__":
    kit.main(EngineBenchmark)
