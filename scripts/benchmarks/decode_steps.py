#!/usr/bin/env python3
"""What a decode step of the engine takes on the host and on the device, in its loop and without.

    $ python scripts/benchmarks/decode_steps.py --json docs/generation/decode-steps.json
    $ python scripts/benchmarks/decode_steps.py --device cpu --batch 1,8 --steps 8 --num-layers 2 \
          --hidden-size 64 --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 \
          --qk-pos-emb-head-dim 8 --v-head-dim 16 --heads 4 --ffn-hidden-size 64 --vocab-size 128

A model of random weights generates for some requests at once, none of which ends while steps are
timed: by Megatron's scheduler with a CUDA graph for each layer ("megatron"), and in the decode loop
with one for the whole step ("loop"), each in default and in parity mode. Output:

    30.1 s  default, loop, 128 sampled: step_ms 1.7, host_ms 0.4, device_ms 1.4

step_ms is from one report of tokens to the next, host_ms the part of it in which the host does not
wait for the device, device_ms the time of the step's graph, replayed without the host. The exit
code is 1 if a row has an error, such as tokens that differ; the last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks import engine_model
from benchmarks.kit import arguments, provenance
from benchmarks.kit.arguments import DIMS, count, dims_of, list_of, one_of, parse_sizes
from benchmarks.kit.generating import GeneratingBenchmark
from benchmarks.kit.report import Report, measured_fields
from console.parser import Parser
from console.script import leave

if TYPE_CHECKING:
    from absorbed_mla.serving.engine import Engine
    from absorbed_mla.serving.sampling.parameters import SamplingParams

MODES = ("default", "parity")
LOOPS = ("megatron", "loop")
DRAWS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 1.0, "top_p": 0.9},
}
# Steps before the timed ones, in which graphs are captured.
WARM_UP = 6
# Most tokens of a step.
STEP_TOKENS = 2048
# Replays of a graph that are timed together.
REPLAYS = 20


@dataclass(frozen=True)
class Case:
    """Steps of one kind.

    Attributes:
        mode: One of ``MODES``.
        loop: One of ``LOOPS``.
        batch: Running requests.
        draws: One of ``DRAWS``.
    """

    mode: str
    loop: str
    batch: int
    draws: str

    def __str__(self) -> str:
        return f"{self.mode}, {self.loop}, {self.batch} {self.draws}"


@dataclass(frozen=True)
class Row:
    """What a step took.

    Attributes:
        case: What ran.
        error: What it raised, or what was wrong; ``""`` if all is well.
        step_ms: Mean of the timed steps.
        host_ms: The part in which the host did not wait for the device.
        device_ms: Of the step's graph alone; None without one.
        of_default: ``step_ms`` divided by that of default mode, in parity mode.
    """

    case: Case
    error: str = ""
    step_ms: float | None = None
    host_ms: float | None = None
    device_ms: float | None = None
    of_default: float | None = None


class StepsReport(Report):
    """One run."""

    row = Row

    def figures(self, row: Row) -> dict[str, float]:
        """All that were measured."""
        return measured_fields(row)


class StepsBenchmark(GeneratingBenchmark):
    """All cases of a mode in one engine."""

    script = "decode_steps.py"
    report = StepsReport

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        # What engine_model.py asks for.
        args.longest_prompt = args.prompt
        # The first requests decode while the last prompts are read.
        reading = -(-max(args.batch) * args.prompt // STEP_TOKENS)
        args.longest_output = WARM_UP + args.steps + 2 * reading + 2
        self._mode, self._engine, self._opened = "", None, ExitStack()
        self._tokens: dict[Case, list[list[int]]] = {}
        self._step_ms: dict[Case, float] = {}

    @classmethod
    def add_options(cls, parser: Parser) -> None:
        """See --help."""
        add = parser.add_argument
        arguments.add_common(
            parser, json=None, render=None, device=None, time_limit=240.0, seed=1234
        )
        add("--modes", type=list_of(one_of(MODES)), default="default,parity", help="to compare")
        add("--loops", type=list_of(one_of(LOOPS)), default="megatron,loop", help="to compare")
        add("--batch", type=parse_sizes, default="1,32,128", help="requests that run together")
        add(
            "--draws",
            type=list_of(one_of(tuple(DRAWS))),
            default="greedy,sampled",
            help="how tokens are chosen",
        )
        add("--prompt", type=count, default=100, help="tokens of each prompt")
        add("--steps", type=count, default=50, help="decode steps that are timed")
        add("--num-layers", type=count, default=4, help="decoder layers of the model")
        add("--heads", type=count, default=128, help="attention heads of each layer")
        add("--ffn-hidden-size", type=count, default=2048, help="width of the MLP")
        add("--vocab-size", type=count, default=32768, help="rows of the embedding")
        arguments.add_dims(parser, DIMS)

    def environment(self) -> dict:
        """With the sizes of the model."""
        args = self.args
        return provenance.describe(
            self.processes.on_gpu,
            self.processes.dtype,
            dims={**dims_of(args), "heads": args.heads, "layers": args.num_layers},
            vocab_size=args.vocab_size,
            prompt=args.prompt,
            steps=args.steps,
        )

    def cases(self) -> list[Case]:
        """Both loops of the same requests, one after the other."""
        args = self.args
        return [
            Case(mode, loop, batch, draws)
            for mode in args.modes
            for batch in args.batch
            for draws in args.draws
            for loop in args.loops
        ]

    def exit_code(self, report: Report) -> int:
        """1 if a case failed."""
        self._opened.close()
        return int(any(row.error for row in report.rows))

    def measure(self, case: Case) -> Row:
        """Run the requests of a case, from their prompts to the last timed step."""
        if case.mode != self._mode:
            self._open(case.mode)
        engine = self._engine
        assert engine is not None
        loop, engine.decode_loop = engine.decode_loop, None
        if case.loop == "loop":
            engine.decode_loop = loop
        try:
            return self._timed(engine, case)
        finally:
            engine.stop()
            engine.decode_loop = loop

    def _timed(self, engine: Engine, case: Case) -> Row:
        engine.start()
        for number in range(case.batch):
            engine.add_request(self._prompt(number), self._params(case, number))
        tokens: list[list[int]] = [[] for _ in range(case.batch)]
        # Until all prompts are read.
        while not all(tokens):
            self._step(engine, tokens)
        for _ in range(WARM_UP):
            self._step(engine, tokens)
        waited = _Waited(engine)
        start = self._clock()
        for _ in range(self.args.steps):
            self._step(engine, tokens)
        seconds = self._clock() - start
        step_ms = seconds * 1e3 / self.args.steps
        host_ms = (seconds - waited.end()) * 1e3 / self.args.steps
        self._step_ms[case], self._tokens[case] = step_ms, tokens
        default = self._step_ms.get(dataclasses.replace(case, mode="default"))
        return Row(
            case,
            self._differs(case, tokens),
            step_ms,
            host_ms,
            self._device_ms(engine),
            step_ms / default if default and case.mode == "parity" else None,
        )

    def _step(self, engine: Engine, tokens: list[list[int]]) -> None:
        for progress in engine.step():
            tokens[progress.number] += progress.tokens

    def _differs(self, case: Case, tokens: list[list[int]]) -> str:
        """Which request has other tokens than with Megatron's scheduler, or ``""``."""
        expected = self._tokens.get(dataclasses.replace(case, loop="megatron"), tokens)
        for number, (ours, theirs) in enumerate(zip(tokens, expected, strict=True)):
            if ours != theirs:
                return f"request {number} has other tokens than with Megatron's scheduler"
        return ""

    def _device_ms(self, engine: Engine) -> float | None:
        """Of the graph that ran last; its step may be repeated."""
        import torch

        loop = engine.decode_loop
        if loop is None or loop.graphs is None:
            return None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            loop.graphs.repeat()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / REPLAYS

    def _open(self, mode: str) -> None:
        """Make the model and the engine of a mode."""
        from absorbed_mla.batch_invariant import batch_invariant_mode
        from absorbed_mla.serving.engine import Engine
        from absorbed_mla.serving.engine_options import EngineOptions
        from absorbed_mla.serving.scheduler.cuda_graphs import deleting_graphs

        self._opened.close()
        self._engine, on_gpu = None, self.processes.on_gpu
        self.args.batch_invariant = mode == "parity"
        if self.args.batch_invariant:
            self._opened.enter_context(batch_invariant_mode())
        case, most = engine_model.Case("ours", graphs=True), max(self.args.batch)
        model = engine_model.build(case, self.args, self.processes, self.processes.dtype)
        length = self.args.longest_prompt + self.args.longest_output
        options = EngineOptions(
            max_sequence_length=-(-length // 64) * 64,
            max_requests=most,
            step_tokens=STEP_TOKENS,
            prefix_caching=False,
            num_cuda_graphs=16,
            # Prompts are not timed.
            inference_config={"use_cuda_graphs_for_non_decode_steps": False},
        )
        self._opened.enter_context(deleting_graphs(on_gpu))
        self._engine, self._mode = Engine(model, options), mode
        self._opened.callback(self._engine.close)

    def _params(self, case: Case, number: int) -> SamplingParams:
        from absorbed_mla.serving.sampling.parameters import SamplingParams

        tokens = self.args.longest_output
        return SamplingParams(max_tokens=tokens, seed=number, **DRAWS[case.draws])

    def _prompt(self, number: int) -> list[int]:
        import torch

        generator = torch.Generator().manual_seed(self.args.seed + number)
        size = (self.args.prompt,)
        return torch.randint(self.args.vocab_size, size, generator=generator).tolist()

    def _clock(self) -> float:
        self.processes.synchronize()
        return time.perf_counter()


class _Waited:
    """Seconds that an engine's host waits for the device, from now on.

    Args:
        engine: With its decode loop or without.
    """

    def __init__(self, engine: Engine) -> None:
        self._loop, self._seconds = engine.decode_loop, 0.0
        self._before = 0.0 if self._loop is None else self._loop.waited
        self._controller = engine.host.controller
        # Where Megatron's step waits for the tokens.
        self._transfer: Callable = self._controller._transfer_samples_to_cpu
        self._controller._transfer_samples_to_cpu = self._timed

    def end(self) -> float:
        """The seconds; nothing is measured any more."""
        self._controller._transfer_samples_to_cpu = self._transfer
        return self._seconds + (0.0 if self._loop is None else self._loop.waited - self._before)

    def _timed(self, count: int) -> tuple:
        start = time.perf_counter()
        found = self._transfer(count)
        self._seconds += time.perf_counter() - start
        return found


if __name__ == "__main__":
    leave(StepsBenchmark.main())
