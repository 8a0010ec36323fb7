#!/usr/bin/env python3
"""Load on ``LLM`` in parity mode: is every token right, is a block of the cache lost, how long?

    $ python scripts/benchmarks/load.py --device cpu --json load.json
    $ python scripts/benchmarks/load.py --model DeepSeek-V2-Lite --dtype bfloat16 --json load.json

Clients send requests one after the other, some of them after a pause. Prompts have mixed lengths,
and half of them a beginning that others share; a third of the requests is greedy, the others are
sampled with every kind of filter and penalty; every eighth has two outputs, and every tenth is
aborted after some tokens. The cache is too small for all that run, so that requests are evicted.
Afterwards no block of the cache may be lost, and every request must have the tokens that it has
alone, in an ``LLM`` that runs one output at a time and caches no prefixes; an aborted one must have
the first of them. Latencies are those of a caller of ``LLM`` in the same process; a server adds
its HTTP. Without ``--model``, a tiny model with random weights runs. Output:

    95.1 s  parity mode: tokens_per_second 310, first_token_p50_ms 60, ..., equal 1000, different 0

The exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absorbed_mla.serving.options import DTYPES
from benchmarks import kit
from benchmarks.engine import VerdictReport
from benchmarks.engine_requests import longest, scarce_blocks
from benchmarks.load_requests import Outcome, Request, run, run_alone, verdict, workload
from console.parser import Parser

if TYPE_CHECKING:
    from absorbed_mla import LLM

torch: Any = kit.lazy("torch")
CASE = "parity mode"
# Requests that run before the clock does: they compile kernels.
WARM_UP = 8
# Of the model that runs without --model.
TINY = {"model": "deepseek-v2-lite", "layers": 2, "experts": 4, "scale_down": 16, "vocab_size": 512}


@dataclass(frozen=True, kw_only=True)
class Row(kit.Row):
    """What one load did."""

    case: str  # its name
    seconds: float | None = None  # from the first request to the end of the last
    generated: int = 0  # tokens
    requests: dict[str, int] = field(default_factory=dict)  # numbers of requests of each kind
    # What the engine did: fields of Statistics.
    engine: dict[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()  # of what the load should make happen, what did not
    # Milliseconds by first_token, token and request, each p50, p99, most.
    latencies: dict[str, dict[str, float]] = field(default_factory=dict)
    equal: int = 0  # requests whose tokens are those that they have alone, or the first of them
    different: tuple[int, ...] = ()  # numbers of the others

    @property
    def tokens_per_second(self) -> float | None:
        """Generated, over all requests."""
        return self.generated / self.seconds if self.seconds else None

    @property
    def ok(self) -> bool:
        """Whether it ran, was put to the test, and every token is right."""
        return not (self.error or self.missing or self.different)


class LoadReport(VerdictReport):
    """One run."""

    row = Row

    def figures(self, row: Row) -> dict[str, float]:
        """Rate, latencies, what happened, and the verdict."""
        latencies = {
            f"{name}_{which}_ms": value
            for name, values in row.latencies.items()
            for which, value in values.items()
        }
        return {
            "tokens_per_second": row.tokens_per_second or 0.0,
            **latencies,
            **row.requests,
            **row.engine,
            "equal": row.equal,
            "different": len(row.different),
        }


class LoadBenchmark(kit.Benchmark):
    """One load on one model."""

    report = LoadReport
    options = kit.declare(
        "json render device seed=1234",
        model=kit.Option("folder with a checkpoint (default: a tiny model)", Path),
        dtype=kit.one(
            "of the model; auto is the checkpoint's, float32 for the tiny one", DTYPES, "auto"
        ),
        tensor_parallel_size=kit.number("processes of the model", 1),
        requests=kit.number("number of requests", 1000),
        clients=kit.number("that send them, each one after the other", 96),
        longest_prompt=kit.number("in tokens", 256),
        shared_prefix=kit.number(
            "tokens at the beginning of every other prompt that are one of four prefixes", 128
        ),
        longest_output=kit.number("in tokens", 32),
        max_num_seqs=kit.number("most outputs in one forward pass", 48),
        max_num_batched_tokens=kit.number("most tokens in one forward pass", 256),
        cache_tokens=kit.number("of all requests (default: too few for --max-num-seqs)"),
    )
    quick = (
        "--requests 14 --clients 14 --longest-prompt 124 --shared-prefix 66 --longest-output 40 "
        "--max-num-seqs 14 --max-num-batched-tokens 192 --cache-tokens 640"
    )
    recorded = (
        *("tensor_parallel_size", "clients"),
        *("max_num_seqs", "max_num_batched_tokens", "cache_tokens"),
    )

    def prepare(self) -> None:
        """The checkpoint and the requests."""
        args = self.args
        self._stack = contextlib.ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        self._folder = args.model or _tiny_model(Path(folder), args.seed)
        from absorbed_mla.serving.llm_options import LLMOptions
        from absorbed_mla.serving.weights.load import model_dtype, open_model

        checkpoint = open_model(self._folder)
        self._dtype = model_dtype(LLMOptions(dtype=args.dtype), checkpoint)
        self.requests = workload(args, checkpoint.config.vocab_size)
        args.cache_tokens = args.cache_tokens or 64 * scarce_blocks(
            self.requests, args.max_num_seqs
        )

    @classmethod
    def check(cls, parser: Parser, args: argparse.Namespace) -> None:
        """What the workload needs."""
        if args.shared_prefix >= args.longest_prompt:
            parser.error(
                f"--shared-prefix must be below --longest-prompt={args.longest_prompt}, "
                f"got {args.shared_prefix}"
            )

    def environment(self) -> dict:
        """With the sizes of the load."""
        return kit.provenance.describe(
            torch.cuda.is_available(),
            self._dtype,
            model=str(self.args.model.name) if self.args.model else "tiny",
            prompt_tokens=sum(len(request.prompt) for request in self.requests),
            **self.about(),
        )

    def cases(self) -> list[str]:
        """There is one."""
        return [CASE]

    def measure(self, case: str) -> Row:
        """Run the load, then each request alone."""
        with self._stack:
            with self._llm(
                max_num_seqs=self.args.max_num_seqs,
                max_num_batched_tokens=self.args.max_num_batched_tokens,
                cache_tokens=self.args.cache_tokens,
            ) as llm:
                run(llm, self._warm_up(), 1)
                before = dataclasses.asdict(llm.statistics())
                begin = time.perf_counter()
                outcomes = run(llm, self.requests, self.args.clients)
                seconds = time.perf_counter() - begin
                llm.require_no_leak()
                engine = _since(before, dataclasses.asdict(llm.statistics()))
            whole = self._longest()
            with self._llm(
                max_num_seqs=1,
                max_num_batched_tokens=whole,
                cache_tokens=whole,
                enable_prefix_caching=False,
            ) as llm:
                alone = run_alone(llm, self.requests)
        different = verdict(self.requests, outcomes, alone)
        return Row(
            case=case,
            seconds=seconds,
            generated=sum(len(tokens) for outcome in outcomes for tokens in outcome.tokens),
            requests=_kinds(self.requests, outcomes),
            engine=engine,
            missing=missing(engine, outcomes, len(self.requests)),
            latencies=latencies(outcomes),
            equal=len(self.requests) - len(different),
            different=tuple(different[:20]),
        )

    def exit_code(self, report: kit.Report) -> int:
        """1 if anything is wrong."""
        return int(not all(row.ok for row in report.rows))

    @contextlib.contextmanager
    def _llm(self, **sizes: Any) -> Iterator[LLM]:
        from absorbed_mla import LLM

        with LLM(
            self._folder,
            dtype=self.args.dtype,
            tensor_parallel_size=self.args.tensor_parallel_size,
            max_model_len=self._longest(),
            parity=True,
            **sizes,
        ) as llm:
            yield llm

    def _longest(self) -> int:
        """Tokens of the longest request, in whole blocks."""
        return -(-longest(self.requests) // 64) * 64

    def _warm_up(self) -> list[Request]:
        """Requests with other prompts, which leave no prefixes for the load."""
        changed = argparse.Namespace(**{**vars(self.args), "seed": self.args.seed + 1})
        vocab_size = 1 + max(max(request.prompt) for request in self.requests)
        return workload(changed, vocab_size)[:WARM_UP]


def _tiny_model(folder: Path, seed: int) -> Path:
    """Write a checkpoint whose weights are so large that every token depends on its prompt."""
    from safetensors.torch import save_file

    from benchmarks.synthetic_checkpoint.models import Choice, model_config, stored_tensors

    config = {**model_config(Choice(**TINY)), "torch_dtype": "float32"}
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        tensor.name: 0.2 * torch.randn(tensor.shape, generator=generator) + (tensor.role == "norm")
        for tensor in stored_tensors(config)
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _since(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    """Counters without what came before; maxima as they are."""
    return {k: v if k.startswith("most_") else v - before[k] for k, v in now.items()}


def _kinds(requests: Sequence[Request], outcomes: Sequence[Outcome]) -> dict[str, int]:
    return {
        "requests": len(requests),
        "outputs": sum(request.params.n for request in requests),
        "greedy": sum(request.params.is_greedy for request in requests),
        "aborted": sum(outcome.aborted for outcome in outcomes),
        "after_a_pause": sum(request.pause > 0 for request in requests),
    }


def missing(engine: dict[str, int], outcomes: Sequence[Outcome], number: int) -> tuple[str, ...]:
    """What should have happened, and did not."""
    happened = {
        "every request's end": len(outcomes) == number,
        "an abort": any(outcome.aborted for outcome in outcomes),
        "a prefix found": engine["prefix_blocks"],
        "eviction": engine["evicted"],
        "chunked prefill": engine["chunks"],
        "mixed steps": engine["mixed_steps"],
    }
    return tuple(name for name, did in happened.items() if not did)


def latencies(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """Milliseconds; aborted requests count for first tokens and tokens."""
    seconds = {
        "first_token": [one.first for one in outcomes if one.first is not None],
        "token": [gap for one in outcomes for gap in one.gaps],
        "request": [one.whole for one in outcomes if not one.aborted],
    }
    return {name: _percentiles(values) for name, values in seconds.items()}


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)

    return {"p50": at(0.5), "p99": at(0.99), "most": at(1.0)} if ordered else {}


if __name__ == "__main__":
    kit.main(LoadBenchmark)
