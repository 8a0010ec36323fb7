#!/usr/bin/env python3
"""Measure decode steps of a model over all processes: plain, with a shared cache, requests apart.

    $ torchrun --nproc-per-node 2 scripts/benchmarks/decode_context_parallel.py \
          --json docs/measurements/inference/decode-context-parallel-2.json

For every context and number of requests, Megatron's engine reads random prompts and decodes, in
three layouts of the same model:

- tp: tensor parallelism, all latents on every rank;
- shared: the same, each rank with its part of all latents (decode_context_parallel);
- own: whole attention on each rank, for its part of the requests (data_parallel_attention).

A row has the median time of a step, the rate of all ranks, and the bytes of the cache and of the
weights of one rank. A table tells the fastest layout of each context and number of requests, and
the rates with the requests that fit into the same memory: with n ranks, n times as many where
latents are on one rank only (give --batch 32,64 on 2 ranks). A request of 8k tokens in and 8k out
holds 12k in the mean: --context 12k is its step. Output:

    30.1 s  shared, 64 requests of 8k: step_ms 5.2, tokens_per_second 12300, cache_gib 0.6
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit
from benchmarks.kit.arguments import count_or_none
from benchmarks.kit.generating import GeneratingBenchmark
from console.parser import Parser
from console.ranks import world_size

if TYPE_CHECKING:
    from absorbed_mla.serving.engine import Engine

# Steps that run before the clock does.
WARM_UP = 3


LAYOUTS = ("tp", "shared", "own")


@dataclass(frozen=True)
class SharedCase(kit.Case):
    """Requests that decode together."""

    text = "{layout}, {batch} requests of {context:k}"
    layout: str  # of the model; one of LAYOUTS
    context: int  # tokens of each prompt
    batch: int  # number of requests, of all ranks


@dataclass(frozen=True, kw_only=True)
class Row(kit.Row):
    """One case."""

    case: SharedCase
    seconds: float | None = None  # median of a decode step
    cache_bytes: int = 0  # of the latents of one rank
    cache_tokens: int = 0  # that these hold
    weight_bytes: int = 0  # of the weights of one rank


class SharedReport(kit.Report):
    """One run."""

    row = Row

    def figures(self, row: Row) -> dict[str, float]:
        """Time, rate and memory."""
        assert row.seconds is not None
        return {
            "step_ms": 1e3 * row.seconds,
            "tokens_per_second": row.case.batch / row.seconds,
            "cache_gib": row.cache_bytes / 2**30,
            "bytes_per_token": row.cache_bytes / row.cache_tokens,
            "weights_gib": row.weight_bytes / 2**30,
        }

    @classmethod
    def notes(cls, reports: Sequence[SharedReport]) -> list[str]:
        """Which layout is fastest."""
        return ["\n".join(line for report in reports for line in report.table())]

    def table(self) -> list[str]:
        """Rates by context and number of requests, for equally many and in the same memory."""
        rates = {row.case: self.figures(row)["tokens_per_second"] for row in self.measured}
        ranks = self.environment["ranks"]
        lines = [
            f"| context | requests | {' | '.join(LAYOUTS)} | best | tp, 1/{ranks} of them |",
            f"| --- | --- |{' ---: |' * len(LAYOUTS)} --- | ---: |",
        ]
        for context, batch in sorted({(case.context, case.batch) for case in rates}):
            found = {layout: rates.get(SharedCase(layout, context, batch)) for layout in LAYOUTS}
            known = {layout: rate for layout, rate in found.items() if rate}
            fewer = (
                rates.get(SharedCase("tp", context, batch // ranks)) if batch % ranks == 0 else None
            )
            cells = [kit.tokens_text(context), str(batch), *map(_cell, found.values())]
            cells += [max(known, key=lambda layout: known[layout]), _cell(fewer)]
            lines.append(f"| {' | '.join(cells)} |")
        return lines


def _cell(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.4g}"


class SharedBenchmark(GeneratingBenchmark):
    """Cases on the ranks of one tensor-parallel group."""

    strict = False
    report = SharedReport
    options = kit.declare(
        "json render device time_limit=480 seed=1234",
        layouts=kit.some("what to measure, as above", LAYOUTS),
        context=kit.sizes("tokens of a prompt", "2k,8k,12k"),
        batch=kit.sizes("requests that decode together", "32,64"),
        steps=kit.number("decode steps that are timed", 20),
        step_tokens=kit.number("most tokens in one forward", 8192),
        num_cuda_graphs=kit.Option(
            "batch sizes to capture as CUDA graphs, 0 for none", count_or_none, 2
        ),
        **kit.MODEL | {"num_layers": kit.number("decoder layers of the model", 2)},
    )
    quick = "--heads 4 --vocab-size 64 --context 70 --batch 2 --steps 1"
    recorded = ("dims",)
    # Megatron's process groups that there are.
    _groups = ""

    @classmethod
    def check(cls, parser: Parser, args: argparse.Namespace) -> None:
        """Ranks to share a cache."""
        if world_size() < 2 and not args.render:
            parser.error(
                "a cache is shared by 2 or more processes, got 1; start this script by "
                "torchrun --nproc-per-node 2"
            )

    def about(self) -> dict:
        """With the number of ranks."""
        graphs = bool(self.args.num_cuda_graphs)
        return super().about() | {"ranks": self.processes.size, "cuda_graphs": graphs}

    def cases(self) -> list[SharedCase]:
        """Shorter contexts first; those with other process groups last."""
        args = self.args
        return [
            SharedCase(layout, context, batch)
            for groups in (("tp", "shared"), ("own",))
            for context in sorted(args.context)
            for batch in sorted(args.batch)
            for layout in groups
            if layout in args.layouts
        ]

    def measure(self, case: SharedCase) -> Row:
        """Measure one case."""
        from absorbed_mla.serving.scheduler.cuda_graphs import deleting_graphs

        with deleting_graphs(bool(self.args.num_cuda_graphs) and self.processes.on_gpu):
            self._enter(case.layout)
            return self._measure(case)

    def _enter(self, layout: str) -> None:
        """Have Megatron's process groups of a layout."""
        from megatron.core import parallel_state

        groups = "own" if layout == "own" else "tp"
        if groups == self._groups:
            return
        parallel_state.destroy_model_parallel()
        size = self.processes.size
        own = {"tensor_model_parallel_size": 1, "expert_tensor_parallel_size": size}
        parallel_state.initialize_model_parallel(
            **own if groups == "own" else {"tensor_model_parallel_size": size}
        )
        self._groups = groups

    def _measure(self, case: SharedCase) -> Row:
        from absorbed_mla.serving.engine import Engine
        from absorbed_mla.serving.engine_options import EngineOptions
        from absorbed_mla.serving.megatron_engine.allocator import pool_of
        from absorbed_mla.serving.scheduler.block_pool import BLOCK_SIZE

        args, own = self.args, case.layout == "own"
        # The first requests decode while the prompts of the others are read.
        reading = case.batch * -(-case.context // args.step_tokens) + case.batch
        longest = case.context + reading + WARM_UP + args.steps + BLOCK_SIZE
        model = self.model(longest, graphs=bool(args.num_cuda_graphs), divided=own)
        options = EngineOptions(
            max_sequence_length=-(-longest // BLOCK_SIZE) * BLOCK_SIZE,
            max_requests=-(-case.batch // self.processes.size) if own else case.batch,
            step_tokens=args.step_tokens,
            prefix_caching=False,
            decode_context_parallel=case.layout == "shared",
            num_cuda_graphs=args.num_cuda_graphs or None,
        )
        with Engine(model, options) as engine:
            seconds = self._decode(engine, case, longest - case.context - BLOCK_SIZE)
            context = engine.host.context
            blocks, memory = pool_of(context.kv_block_allocator)[0], context.memory_buffer.nbytes
        return Row(
            case=case,
            seconds=self.processes.maximum([median(seconds)])[0],
            cache_bytes=memory,
            cache_tokens=blocks * BLOCK_SIZE,
            weight_bytes=sum(weight.nbytes for weight in model.parameters()),
        )

    def _decode(self, engine: Engine, case: SharedCase, most: int) -> list[float]:
        """Seconds of steps in which every request decodes; each generates ``most`` tokens."""
        from absorbed_mla.serving.sampling.parameters import SamplingParams

        words = Random(self.args.seed)
        ranks, waiting = self.processes, set()
        for number in range(case.batch):
            prompt = [words.randrange(self.args.vocab_size) for _ in range(case.context)]
            if case.layout != "own" or number % ranks.size == ranks.rank:
                params = SamplingParams(max_tokens=most, temperature=0)
                waiting.add(engine.add_request(prompt, params))
        # Ranks with requests of their own take equally many steps.
        while ranks.maximum([len(waiting)])[0]:
            waiting -= {one.number for one in engine.step() if one.tokens}
        seconds = []
        for _ in range(WARM_UP + self.args.steps):
            start = self.clock()
            engine.step()
            seconds.append(self.clock() - start)
        return seconds[WARM_UP:]


if __name__ == "__main__":
    kit.main(SharedBenchmark)
