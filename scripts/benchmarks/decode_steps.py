#!/usr/bin/env python3
"""What a decode step of the engine takes on the host and on the device, in its loop and without.

    $ python scripts/benchmarks/decode_steps.py --json decode-steps.json

A model of random weights generates for some requests at once, none of which ends while steps are
timed: by Megatron's scheduler with a CUDA graph for each layer ("megatron"), and in the decode loop
with one for the whole step ("loop"), each in default and in parity mode. Output:

    30.1 s  default, loop, 128 sampled: step_ms 1.7, host_ms 0.4, device_ms 1.4

step_ms is from one report of tokens to the next, host_ms the part of it in which the host does not
wait for the device, device_ms the time of the step's graph, replayed without the host. The exit
code is 1 if a row has an error, such as tokens that differ.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit
from benchmarks.kit.generating import GeneratingBenchmark

if TYPE_CHECKING:
    from absorbed_mla.serving.engine import Engine
    from absorbed_mla.serving.sampling.parameters import SamplingParams

torch: Any = kit.lazy("torch")
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
class StepCase(kit.Case):
    """Steps of one kind."""

    text = "{mode}, {loop}, {batch} {draws}"
    mode: str  # one of MODES
    loop: str  # one of LOOPS
    batch: int  # running requests
    draws: str  # one of DRAWS


@dataclass(frozen=True, kw_only=True)
class Row(kit.Row):
    """What a step took."""

    case: StepCase
    step_ms: float | None = None  # mean of the timed steps
    host_ms: float | None = None  # the part in which the host did not wait for the device
    device_ms: float | None = None  # of the step's graph alone; None without one
    of_default: float | None = None  # in parity mode, step_ms divided by that of default mode


class StepsBenchmark(GeneratingBenchmark):
    """All cases of a mode in one engine."""

    report = kit.Report.of(Row)
    options = kit.declare(
        "json render device time_limit=240 seed=1234",
        modes=kit.some("to compare", MODES),
        loops=kit.some("to compare", LOOPS),
        batch=kit.sizes("requests that run together", "1,32,128"),
        draws=kit.some("how tokens are chosen", DRAWS, "greedy,sampled"),
        prompt=kit.number("tokens of each prompt", 100),
        steps=kit.number("decode steps that are timed", 50),
        **kit.MODEL,
    )
    quick = "--modes parity --batch 1,2 --draws sampled --prompt 20 --steps 2 --vocab-size 64"
    recorded = ("dims", "vocab_size", "prompt", "steps")

    def prepare(self) -> None:
        """How long requests are, and nothing open."""
        super().prepare()
        args = self.args
        # The first requests decode while the last prompts are read.
        reading = -(-max(args.batch) * args.prompt // STEP_TOKENS)
        self.num_tokens = WARM_UP + args.steps + 2 * reading + 2
        self._mode, self._engine, self._opened = "", None, ExitStack()
        self._tokens: dict[StepCase, list[list[int]]] = {}
        self._step_ms: dict[StepCase, float] = {}

    def cases(self) -> list[StepCase]:
        """Both loops of the same requests, one after the other."""
        args = self.args
        return [
            StepCase(mode, loop, batch, draws)
            for mode in args.modes
            for batch in args.batch
            for draws in args.draws
            for loop in args.loops
        ]

    def exit_code(self, report: kit.Report) -> int:
        """1 if a case failed."""
        self._opened.close()
        return super().exit_code(report)

    def measure(self, case: StepCase) -> Row:
        """Run the requests of a case, from their prompts to the last timed step."""
        if case.mode != self._mode:
            self._open(case.mode)
        engine = self._engine
        assert engine is not None
        scheduler, engine.scheduler = engine.scheduler, None
        if case.loop == "loop":
            engine.scheduler = scheduler
        try:
            return self._timed(engine, case)
        finally:
            engine.stop()
            engine.scheduler = scheduler

    def _timed(self, engine: Engine, case: StepCase) -> Row:
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
        start = self.clock()
        for _ in range(self.args.steps):
            self._step(engine, tokens)
        seconds = self.clock() - start
        step_ms = seconds * 1e3 / self.args.steps
        host_ms = (seconds - waited.end()) * 1e3 / self.args.steps
        self._step_ms[case], self._tokens[case] = step_ms, tokens
        default = self._step_ms.get(dataclasses.replace(case, mode="default"))
        return Row(
            case=case,
            error=self._differs(case, tokens),
            step_ms=step_ms,
            host_ms=host_ms,
            device_ms=self._device_ms(engine),
            of_default=step_ms / default if default and case.mode == "parity" else None,
        )

    def _step(self, engine: Engine, tokens: list[list[int]]) -> None:
        for progress in engine.step():
            tokens[progress.number] += progress.tokens

    def _differs(self, case: StepCase, tokens: list[list[int]]) -> str:
        """Which request has other tokens than with Megatron's scheduler, or ``""``."""
        expected = self._tokens.get(dataclasses.replace(case, loop="megatron"), tokens)
        for number, (ours, theirs) in enumerate(zip(tokens, expected, strict=True)):
            if ours != theirs:
                return f"request {number} has other tokens than with Megatron's scheduler"
        return ""

    def _device_ms(self, engine: Engine) -> float | None:
        """Of the graph that ran last; its step may be repeated."""
        scheduler = engine.scheduler
        if scheduler is None or scheduler.runner.graphs is None:
            return None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            scheduler.runner.graphs.repeat()
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
        self._engine, parity = None, mode == "parity"
        if parity:
            self._opened.enter_context(batch_invariant_mode())
        length = self.args.prompt + self.num_tokens
        model = self.model(length, graphs=True, batch_invariant=parity)
        options = EngineOptions(
            max_sequence_length=-(-length // 64) * 64,
            max_requests=max(self.args.batch),
            step_tokens=STEP_TOKENS,
            prefix_caching=False,
            num_cuda_graphs=16,
            # Prompts are not timed.
            inference_config={"use_cuda_graphs_for_non_decode_steps": False},
        )
        self._opened.enter_context(deleting_graphs(self.processes.on_gpu))
        self._engine, self._mode = Engine(model, options), mode
        self._opened.callback(self._engine.close)

    def _params(self, case: StepCase, number: int) -> SamplingParams:
        from absorbed_mla.serving.sampling.parameters import SamplingParams

        return SamplingParams(max_tokens=self.num_tokens, seed=number, **DRAWS[case.draws])

    def _prompt(self, number: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.args.seed + number)
        size = (self.args.prompt,)
        return torch.randint(self.args.vocab_size, size, generator=generator).tolist()


class _Waited:
    """Seconds that an engine's host waits for the device, from now on.

    Args:
        engine: With its overlap scheduler or without.
    """

    def __init__(self, engine: Engine) -> None:
        self._scheduler, self._seconds = engine.scheduler, 0.0
        self._before = 0.0 if self._scheduler is None else self._scheduler.waited
        self._controller = engine.host.controller
        # Where Megatron's step waits for the tokens.
        self._transfer: Callable = self._controller._transfer_samples_to_cpu
        self._controller._transfer_samples_to_cpu = self._timed

    def end(self) -> float:
        """The seconds; nothing is measured any more."""
        self._controller._transfer_samples_to_cpu = self._transfer
        return self._seconds + (
            0.0 if self._scheduler is None else self._scheduler.waited - self._before
        )

    def _timed(self, count: int) -> tuple:
        start = time.perf_counter()
        found = self._transfer(count)
        self._seconds += time.perf_counter() - start
        return found


if __name__ == "__main__":
    kit.main(StepsBenchmark)
