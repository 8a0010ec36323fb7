#!/usr/bin/env python3
"""Measure what drawing a token for each request takes, our kernels beside PyTorch's functions.

    $ python scripts/benchmarks/drawing.py --json docs/measurements/generation/drawing.json
    $ python scripts/benchmarks/drawing.py --draws min_p,both --logits peaked --requests 64

greedy   the most likely token
sampled  one of all tokens
top_p    one of the most likely ones that together have 0.95 of the probability
top_k    one of the 50 most likely
min_p    one of those with at least 0.05 of the most likely one's probability
both     one of those that top_k 20, then top_p 0.8 leave at temperature 0.6

Logits are in bfloat16: "flat" are normal with standard deviation 3, so that thousands of tokens
have 0.95 of the probability; in "peaked" one of 10,000 is greater by 20. Each request has a seed of
its own. PyTorch's functions are those that draw on a CPU, with a sort for top_p and top_k. Both are
repeated in turns; on a GPU a CUDA graph holds several drawings, one after the other, and times are
those of one. A CPU has PyTorch's only, unless Triton interprets our kernels.

Our tokens must be those that PyTorch's functions draw by the weights that our kernels give to the
tokens, whatever the number of requests; otherwise the row has an error, and the exit code is 1.
PyTorch's own weights are rounded otherwise: "equal" is the share of requests to which they give the
same token. Output:

    12.3 s  top_p, flat logits, 32 requests: ours_us ..., torch_us ..., ratio ..., equal 1
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit
from benchmarks.kit.arguments import parse_size

if TYPE_CHECKING:
    from torch import Tensor

    from absorbed_mla.serving.sampling.parameters import SamplingParams

torch: Any = kit.lazy("torch")
DRAWS = {
    "greedy": {"temperature": 0.0},
    "sampled": {},
    "top_p": {"top_p": 0.95},
    "top_k": {"top_k": 50},
    "min_p": {"min_p": 0.05},
    "both": {"top_k": 20, "top_p": 0.8, "temperature": 0.6},
}
LOGITS = ("flat", "peaked")
# Drawings of a graph: the least of them last as long as many launches of a graph.
_DRAWINGS = {"ours": 32, "torch": 4}


@dataclass(frozen=True)
class DrawingCase(kit.Case):
    """One drawing."""

    text = "{draws}, {logits} logits, {requests} {noun}"
    draws: str  # one of DRAWS
    logits: str  # one of LOGITS
    requests: int  # rows of logits

    @property
    def noun(self) -> str:
        """For the name."""
        return "request" if self.requests == 1 else "requests"


@dataclass(frozen=True, kw_only=True)
class Row(kit.Row):
    """One drawing, by us and by PyTorch."""

    case: DrawingCase
    ours: kit.Times | None = None  # of our kernels; None where they cannot run
    torch: kit.Times | None = None  # of PyTorch's functions; None after an error
    equal: float | None = None  # share of requests with the same token; None without ours


class DrawingReport(kit.Report):
    """One run."""

    row = Row

    def figures(self, row: Row) -> dict[str, float]:
        """Microseconds, their ratio, and the share of equal tokens."""
        assert row.torch is not None
        found = {"torch_us": 1e6 * row.torch.median}
        if row.ours is not None and row.equal is not None:
            ratio = row.ours.median / row.torch.median
            found = {"ours_us": 1e6 * row.ours.median, **found, "ratio": ratio, "equal": row.equal}
        return found

    @classmethod
    def panels(cls, reports: Sequence[DrawingReport]) -> list[kit.Panel]:
        """Microseconds over the requests."""
        points = (
            (f"{row.case.draws}, {row.case.logits} logits [us]", name, row.case.requests, us)
            for report in reports
            for row in report.measured
            for name, us in report.figures(row).items()
            if name.endswith("_us")
        )
        return kit.collected(points, "requests", log_y=True)


class Inputs(NamedTuple):
    """Of one kind of drawing, for the most requests R; fewer take the first ones.

    Attributes:
        params: Of every request.
        logits: bf16 [R, vocabulary].
        numbers: fp64 [6, R], see ``absorbed_mla/serving/sampling/device_sampler.py``.
        expected: Tokens that our kernels must draw, int64 [R]; None where they cannot run.
    """

    params: SamplingParams
    logits: Tensor
    numbers: Tensor
    expected: Tensor | None


class DrawingBenchmark(kit.Benchmark):
    """Our kernels and PyTorch's functions in turns."""

    report = DrawingReport
    options = kit.declare(
        "json plot render only device seconds_per_row=0.2 time_limit=60 seed=1234",
        draws=kit.some("how tokens are chosen (see above)", DRAWS),
        logits=kit.some("their kinds", LOGITS),
        requests=kit.sizes("numbers of requests", "1,32,128"),
        vocab_size=kit.Option("logits of a request", parse_size, "129280"),
    )
    quick = "--requests 1,2 --vocab-size 600"
    recorded = ("vocab_size",)
    strict = True

    def prepare(self) -> None:
        """Of one device; logits are bf16 on a CPU, too."""
        self.use_one_device()
        self.dtype = torch.bfloat16
        self.has_kernels = self.on_gpu or os.environ.get("TRITON_INTERPRET") == "1"
        # The last ones, with their kind.
        self._last: tuple[tuple[str, str], Inputs] | None = None

    def environment(self) -> dict:
        """With the size of the vocabulary."""
        return kit.provenance.describe(self.on_gpu, self.dtype, **self.about())

    def cases(self) -> list[DrawingCase]:
        """By kind, few requests first."""
        args = self.args
        return [DrawingCase(*c) for c in product(args.draws, args.logits, sorted(args.requests))]

    def measure(self, case: DrawingCase) -> Row:
        """Both drawings in turns."""
        from benchmarks.kit.timing import Repeated, in_turns, repetitions

        inputs = self._inputs_of(case)
        works, tokens = {}, {}
        for name, draw in self._calls(inputs, case.requests).items():
            run, tokens[name] = self._repeatable(draw, _DRAWINGS[name])
            works[name] = Repeated(run, on_gpu=self.on_gpu)
        seconds = sum(work.once() for work in works.values())
        turns = in_turns([*works.values()], repetitions(seconds, self.args.seconds_per_row))
        times = {
            name: kit.Times.of(
                [step / (_DRAWINGS[name] if self.on_gpu else 1) for _, _, step in own]
            )
            for name, own in zip(works, turns, strict=True)
        }
        if inputs.expected is None:
            return Row(case=case, **times)
        equal = (tokens["ours"] == tokens["torch"]).double().mean().item()
        error = _difference(tokens["ours"], inputs.expected[: case.requests])
        return Row(case=case, **times, equal=equal, error=error)

    def _repeatable(self, draw: Callable[[], Tensor], count: int) -> tuple[Callable, Tensor]:
        """What draws ``count`` times, on a GPU; the tokens that are there after it."""
        # It compiles.
        tokens = draw()
        if not self.on_gpu:
            return draw, tokens
        from benchmarks.kit.timing import graphed

        def draw_all() -> None:
            nonlocal tokens
            for _ in range(count):
                tokens = draw()

        replay = graphed(draw_all)
        return replay, tokens

    def _calls(self, inputs: Inputs, requests: int) -> dict[str, Callable[[], Tensor]]:
        """A drawing for the first requests, by PyTorch and by us."""
        from absorbed_mla.serving.sampling.device_sampler import draw_by_weights, weigh

        params = inputs.params
        logits, numbers = inputs.logits[:requests], inputs.numbers[:, :requests]

        def by_torch() -> Tensor:
            if params.is_greedy:
                return logits.argmax(-1)
            wide = logits.float()
            return draw_by_weights(wide, weigh(wide, numbers), numbers, filters=params.has_filters)

        calls = {"torch": by_torch}
        if self.has_kernels:
            from absorbed_mla.kernels.sampling.argmax import find_most_likely
            from absorbed_mla.kernels.sampling.draw import draw_tokens

            def ours() -> Tensor:
                if params.is_greedy:
                    return find_most_likely(logits)
                return draw_tokens(logits, numbers, filters=params.has_filters)

            calls["ours"] = ours
        return calls

    def _inputs_of(self, case: DrawingCase) -> Inputs:
        """The same for all numbers of requests, which a request's token must not depend on."""
        kind = case.draws, case.logits
        if self._last is None or self._last[0] != kind:
            self._last = None
            self._last = kind, self._new_inputs(*kind)
        return self._last[1]

    def _new_inputs(self, draws: str, kind: str) -> Inputs:
        from absorbed_mla.serving.sampling.device_sampler import SampledRequest
        from absorbed_mla.serving.sampling.parameters import SamplingParams
        from absorbed_mla.serving.sampling.sampler import draw_numbers

        args, params = self.args, SamplingParams(**DRAWS[draws])
        rows, vocabulary = max(args.requests), args.vocab_size
        make = torch.Generator(self.device).manual_seed(args.seed)
        options: dict[str, Any] = {"generator": make, "device": self.device}
        logits = 3 * torch.randn(rows, vocabulary, **options)
        if kind == "peaked":
            logits += 20 * (torch.rand(rows, vocabulary, **options) < 1e-4)
        logits = logits.to(self.dtype)
        seeds = range(args.seed, args.seed + rows)
        requests = [SampledRequest(params, seed, ()) for seed in seeds]
        table = [draw_numbers(request, 0, vocabulary) for request in requests]
        numbers = torch.tensor(table, dtype=torch.float64, device=self.device).t().contiguous()
        expected = self._expected(logits, numbers, params) if self.has_kernels else None
        return Inputs(params, logits, numbers, expected)

    def _expected(self, logits: Tensor, numbers: Tensor, params: SamplingParams) -> Tensor:
        """The tokens that are drawn by our kernels' weights."""
        if params.is_greedy:
            return logits.argmax(-1)
        from absorbed_mla.serving.sampling.device_sampler import draw_by_weights
        from absorbed_mla.testing.token_probabilities import kernel_weights

        weights = kernel_weights(logits, numbers)
        return draw_by_weights(logits.float(), weights, numbers, filters=params.has_filters)


def _difference(tokens: Tensor, expected: Tensor) -> str:
    """How many tokens are not those expected, and the first of them, or ``""``."""
    wrong = (tokens != expected).nonzero().flatten().tolist()
    if not wrong:
        return ""
    first = wrong[0]
    found = f"request {first} has {tokens[first].item()} instead of {expected[first].item()}"
    return f"{len(wrong)} of {len(tokens)} tokens are wrong: {found}"


if __name__ == "__main__":
    kit.main(DrawingBenchmark)
