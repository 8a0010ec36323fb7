"""One case: all requests together, in a cache that is too small for them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Sequence

from megatron.core.models.gpt import GPTModel

from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.generation.blocks import BLOCK_SIZE
from absorbed_mla.generation.cuda_graphs import deleting_graphs
from absorbed_mla.generation.engine import Engine
from absorbed_mla.generation.options import EngineOptions
from absorbed_mla.generation.requests import Result, Statistics
from absorbed_mla.generation.sampling import SamplingParams
from engine_benchmark.arguments import Case
from engine_benchmark.comparison import TIES, compare
from engine_benchmark.machine import Machine
from engine_benchmark.models import build
from engine_benchmark.row import Row
from engine_benchmark.workload import Request, longest, scarce_blocks

# Requests that run first, so that kernels are compiled when the clock starts.
_WARM_UP = 8


class Bench:
    """Measures one case after another over the same requests.

    Args:
        args: Of the command line.
        machine: To measure on.
        requests: For every case.
    """

    def __init__(
        self, args: argparse.Namespace, machine: Machine, requests: Sequence[Request]
    ) -> None:
        self.args, self.machine, self.requests = args, machine, requests
        self.blocks = args.blocks or scarce_blocks(requests, args.max_requests)
        # Of our attention; its weights are the same in every case.
        self._alone: list[list[int]] | None = None

    def measure(self, case: Case) -> Row:
        """Measure one case; what it raises is in its row."""
        row = Row(case)
        try:
            if self.machine.elapsed > self.args.time_limit:
                raise TimeoutError(f"{self.args.time_limit:g} s are over (--time-limit)")
            with deleting_graphs(case.graphs and self.machine.on_gpu), self._mode(case):
                self._measure(row)
        except Exception as error:
            row.error = f"{type(error).__name__}: {error}"
        # After the block that held the tensors of a failed case in its traceback.
        self.machine.forget()
        return row

    def _measure(self, row: Row) -> None:
        case, args, machine = row.case, self.args, self.machine
        machine.forget()
        model = build(case, args, machine)
        alone = self._each_alone(model) if case.implementation == "ours" else None
        start = machine.clock()
        options = EngineOptions(
            cache_tokens=self.blocks * BLOCK_SIZE,
            paused_cache_tokens=self.blocks // 10 * BLOCK_SIZE,
            num_cuda_graphs=args.num_cuda_graphs if case.graphs else None,
            **self._sizes(),
        )
        with Engine(model, options) as engine:
            row.capture_seconds = machine.clock() - start
            generate(engine, self.requests[:_WARM_UP])
            start = machine.clock()
            results = generate(engine, self.requests)
            row.seconds = machine.clock() - start
            engine.require_no_leak()
        row.peak_bytes = machine.peak_bytes()
        tokens = [result.tokens for result in results]
        row.generated = sum(map(len, tokens))
        row.engine = dataclasses.asdict(engine.statistics)
        row.missing = missing(engine.statistics, case)
        row.error = errors(results)
        if alone is not None:
            row.comparison = compare(model, self.requests, tokens, alone, self.tie)

    @property
    def tie(self) -> float:
        """Log-probability by which a token may be below the likeliest."""
        if self.args.tie is not None:
            return self.args.tie
        # In parity mode there is nothing to excuse.
        return 0.0 if self.args.batch_invariant else TIES[self.machine.dtype]

    def _mode(self, case: Case) -> contextlib.AbstractContextManager[None]:
        ours = case.implementation == "ours"
        return (
            batch_invariant_mode()
            if ours and self.args.batch_invariant
            else contextlib.nullcontext()
        )

    def _each_alone(self, model: GPTModel) -> list[list[int]]:
        """Tokens of every request in an engine without anything else, eager."""
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
            "max_sequence_length": _rounded(longest(self.requests)),
            "max_requests": self.args.max_requests,
            "step_tokens": self.args.max_tokens,
        }


def generate(engine: Engine, requests: Sequence[Request]) -> list[Result]:
    """Run greedy requests together."""
    return engine.generate(
        [request.prompt for request in requests],
        [SamplingParams(num_tokens=request.num_tokens, top_k=1) for request in requests],
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
    """Of the first request that could not run; ``""`` if there is none."""
    for number, result in enumerate(results):
        if result.error:
            return f"request {number}: {result.error}"
    return ""


def _rounded(tokens: int) -> int:
    """To the multiple that Megatron pads to."""
    return -(-tokens // 64) * 64
