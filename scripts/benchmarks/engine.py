#!/usr/bin/env python3
"""Generate many requests with Megatron's dynamic engine: are the tokens right, and how fast?

    $ python scripts/benchmarks/engine.py --json engine.json
    $ python scripts/benchmarks/engine.py --batch-invariant --implementations ours
    $ NVIDIA_TF32_OVERRIDE=0 python scripts/benchmarks/engine.py --dtype float32 --num-layers 2 \
          --heads 16 --requests 100
    $ python scripts/benchmarks/engine.py --device cpu --hidden-size 64 --q-lora-rank 32 \
          --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --heads 4 \
          --ffn-hidden-size 64 --num-layers 2 --vocab-size 128 --requests 12 --longest-prompt 160 \
          --shared-prefix 70 --longest-output 40 --max-requests 8 --max-tokens 128

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

The exit code is 1 if ours is wrong; the last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.engine_model import Case, build
from benchmarks.engine_requests import (
    Comparison,
    Request,
    compare,
    longest,
    scarce_blocks,
    workload,
)
from benchmarks.kit import arguments, provenance
from benchmarks.kit.arguments import DIMS, count, count_or_none, dims_of, list_of, one_of
from benchmarks.kit.generating import GeneratingBenchmark
from benchmarks.kit.report import Report
from console.parser import Parser
from console.script import leave

if TYPE_CHECKING:
    import torch
    from megatron.core.models.gpt import GPTModel

    from absorbed_mla.serving.engine import Engine
    from absorbed_mla.serving.request_results import Result
    from absorbed_mla.serving.statistics import Statistics

IMPLEMENTATIONS = ("ours", "standard")
# Requests that run first, so that kernels are compiled when the clock starts.
WARM_UP = 8
# Differences of log-probabilities up to which either of two tokens may be chosen.
TIES = {"float32": 1e-3, "bfloat16": 0.1}


def cases(args: argparse.Namespace) -> list[Case]:
    """Eager ones first: an error in a graph may take the device away."""
    ways = (False, True) if args.num_cuda_graphs else (False,)
    return [Case(one, graphs) for graphs in ways for one in args.implementations]


@dataclass(frozen=True)
class Row:
    """All requests in one engine.

    Attributes:
        case: What ran.
        error: What it raised, or what was wrong with what it did; ``""`` if all is well.
        seconds: From the first request to the end of the last.
        generated: Tokens.
        engine: What the engine did: ``Run`` without its results.
        missing: Of what the workload should make the engine do, what did not happen.
        capture_seconds: To make the engine, CUDA graphs included.
        peak_bytes: Of device memory, or None.
        comparison: With the tokens that every request has alone, or None.
    """

    case: Case
    error: str = ""
    seconds: float | None = None
    generated: int = 0
    engine: dict[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    capture_seconds: float | None = None
    peak_bytes: int | None = None
    comparison: Comparison | None = None

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


def missing(run: Statistics, case: Case) -> tuple[str, ...]:
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


class EngineReport(Report):
    """One run."""

    row = Row

    def as_json(self, row: Row) -> dict:
        """With the rate and the verdict."""
        derived = {"tokens_per_second": row.tokens_per_second, "ok": row.ok}
        return {**dataclasses.asdict(row), **derived}

    def summary(self) -> dict:
        """The whole file."""
        rows = [self.as_json(row) for row in self.rows]
        return {"environment": self.environment, "rows": rows}

    def figures(self, row: Row) -> dict[str, float]:
        """The rate, what the engine did, and the comparison."""
        found: dict[str, float] = {"tokens_per_second": row.tokens_per_second or 0.0, **row.engine}
        if row.comparison:
            same = row.comparison
            found |= {"same": same.equal, "ties": same.ties, "different": same.different}
        return found

    def line(self, row: Row) -> str:
        """With what did not happen."""
        missing = f"; did not happen: {', '.join(row.missing)}" if row.missing else ""
        return super().line(row) + missing


class EngineBenchmark(GeneratingBenchmark):
    """Cases over the same requests, on one device."""

    script = "engine.py"
    report = EngineReport

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        import torch

        self.requests = workload(args)
        self.dtype = getattr(torch, args.dtype) if args.dtype else self.processes.dtype
        self.blocks = args.blocks or scarce_blocks(self.requests, args.max_requests)
        # Of our attention; its weights are the same in every case.
        self._alone: list[list[int]] | None = None

    @classmethod
    def add_options(cls, parser: Parser) -> None:
        """See --help."""
        add = parser.add_argument
        arguments.add_common(
            parser, json=None, render=None, device=None, time_limit=480.0, seed=1234
        )
        dtype = "of the model (default: bfloat16 on a GPU, float32 on a CPU)"
        add("--dtype", choices=tuple(TIES), help=dtype)
        implementations = list_of(one_of(IMPLEMENTATIONS))
        whose = "whose attention to run"
        add("--implementations", type=implementations, default="ours,standard", help=whose)
        parity = "run ours in parity mode, which allows no different tokens"
        add("--batch-invariant", action="store_true", help=parity)
        add("--requests", type=count, default=200, help="number of requests, all sent at once")
        add("--longest-prompt", type=count, default=1024, help="in tokens")
        prefix = "tokens at the beginning of every other prompt that are one of four prefixes"
        add("--shared-prefix", type=count, default=256, help=prefix)
        add("--longest-output", type=count, default=128, help="in tokens")
        add("--max-requests", type=count, default=64, help="most requests in one forward")
        add("--max-tokens", type=count, default=1024, help="most tokens in one forward")
        blocks = "blocks of 64 tokens in the cache (default: too few for --max-requests)"
        add("--blocks", type=count, help=blocks)
        graphs = "batch sizes to capture as CUDA graphs, 0 for none"
        add("--num-cuda-graphs", type=count_or_none, default=16, help=graphs)
        add("--num-layers", type=count, default=4, help="decoder layers of the model")
        add("--heads", type=count, default=128, help="attention heads of each layer")
        add("--ffn-hidden-size", type=count, default=2048, help="width of the MLP")
        add("--vocab-size", type=count, default=32768, help="rows of the embedding")
        arguments.add_dims(parser, DIMS)

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
        """With the sizes of the model and of the workload."""
        return provenance.describe(
            self.processes.on_gpu,
            self.dtype,
            dims={
                **dims_of(self.args),
                "heads": self.args.heads,
                "layers": self.args.num_layers,
            },
            requests=len(self.requests),
            prompt_tokens=sum(len(request.prompt) for request in self.requests),
            asked_for=sum(request.num_tokens for request in self.requests),
            blocks=self.blocks,
            versions=provenance.versions(["flash-mla"]),
        )

    def cases(self) -> list[Case]:
        """Eager ones first."""
        return cases(self.args)

    def measure(self, case: Case) -> Row:
        """Measure one case."""
        from absorbed_mla.serving.scheduler.cuda_graphs import deleting_graphs

        with deleting_graphs(case.graphs and self.processes.on_gpu), self._mode(case):
            return self._measure(case)

    def _measure(self, case: Case) -> Row:
        import torch

        from absorbed_mla.serving.engine import Engine
        from absorbed_mla.serving.engine_options import EngineOptions
        from absorbed_mla.serving.scheduler.block_pool import BLOCK_SIZE

        on_gpu = self.processes.on_gpu
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        model = build(case, self.args, self.processes, self.dtype)
        alone = self._each_alone(model) if case.implementation == "ours" else None
        start = self._clock()
        options = EngineOptions(
            cache_tokens=self.blocks * BLOCK_SIZE,
            paused_cache_tokens=self.blocks // 10 * BLOCK_SIZE,
            num_cuda_graphs=self.args.num_cuda_graphs if case.graphs else None,
            **self._sizes(),
        )
        with Engine(model, options) as engine:
            capture_seconds = self._clock() - start
            generate(engine, self.requests[:WARM_UP])
            start = self._clock()
            results = generate(engine, self.requests)
            seconds = self._clock() - start
            engine.require_no_leak()
        peak_bytes = torch.cuda.max_memory_allocated() if on_gpu else None
        tokens = [result.tokens for result in results]
        comparison = None
        if alone is not None:
            comparison = compare(model, self.requests, tokens, alone, tie(self.args, self.dtype))
        return Row(
            case,
            error=errors(results),
            seconds=seconds,
            generated=sum(map(len, tokens)),
            engine=dataclasses.asdict(engine.statistics),
            missing=missing(engine.statistics, case),
            capture_seconds=capture_seconds,
            peak_bytes=peak_bytes,
            comparison=comparison,
        )

    def _mode(self, case: Case) -> contextlib.AbstractContextManager[None]:
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
                cache_tokens=self.blocks * BLOCK_SIZE,
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

    def _clock(self) -> float:
        """Seconds, after everything that the device was given."""
        self.processes.synchronize()
        return time.perf_counter()

    def exit_code(self, report: Report) -> int:
        """1 if ours is wrong."""
        return int(not all(row.ok for row in report.rows if row.case.implementation == "ours"))


if __name__ == "__main__":
    leave(EngineBenchmark.main())
