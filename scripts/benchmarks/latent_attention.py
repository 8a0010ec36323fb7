#!/usr/bin/env python3
"""Measure attention over the latent, beside FlashAttention-3's, whose forward takes it too.

    $ python scripts/benchmarks/latent_attention.py --json docs/measurements/kernels/latent.json
    $ python scripts/benchmarks/latent_attention.py --heads 16 --seq-lens 8k --seconds-per-row 0.5

One causal sequence, one key [latent | k_rope] for all heads. Implementations of an input are
repeated in turns:

queued  calls queued one behind the other, the GPU's time of each
called  the host waits for the end of every call; its own part counts, too

FlashAttention-3 (forward only, ``qv``) is vLLM's, as a package or as the library in its wheel, see
``peers/libraries.py``. TFLOP/s count 2 (2 C + R) operations per head and visible pair forward, and
2 (5 C + 3 R) backward. "difference" is from our first implementation, relative to the largest
value. Output:

    3.1 s  forward n=16 S=8192: ours, hopper: queued 650 TFLOP/s, called 610 TFLOP/s
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit
from benchmarks.core_attention import (
    CoreCase,
    attention_flops,
    build_core,
    pair_widths,
    random_inputs,
)
from benchmarks.peers.libraries import flash_attention_3, require_flash_attention_3

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.kit.timing import Repeated

torch: Any = kit.lazy("torch")
_PEER = "FlashAttention-3"
# The same kernels' results to the bit in every run, see torch.use_deterministic_algorithms.
_DETERMINISTIC = "ours, hopper, deterministic"
IMPLEMENTATIONS = {
    "forward": ("ours, hopper", "ours, triton", "ours, reference", _PEER),
    "backward": ("ours, hopper", _DETERMINISTIC, "ours, triton", "ours, reference"),
}
EVERY = dict.fromkeys(name for names in IMPLEMENTATIONS.values() for name in names)


@dataclass(frozen=True)
class LatentCase(kit.Case):
    """One implementation on one input."""

    text = "{work} n={heads} S={tokens}: {implementation}"
    work: str  # "forward" or "backward"
    heads: int
    tokens: int
    implementation: str  # one of IMPLEMENTATIONS


@dataclass(frozen=True, kw_only=True)
class Row(kit.TimedRow):
    """Times of a queued call, and of one whose end the host waits for."""

    case: LatentCase
    called: kit.Times | None = None


class LatentReport(kit.Report):
    """One run."""

    row = Row

    def figures(self, row: Row) -> dict[str, float]:
        """Milliseconds and TFLOP/s of both ways to call."""
        flops, found = row.more["flops"], {}
        for name, times in (("queued", row.times), ("called", row.called)):
            assert times is not None
            found[f"{name}_ms"] = round(1e3 * times.median, 4)
            found[f"{name}_tflops"] = flops / times.median / 1e12
        return {**found, "difference": row.more["difference"]}

    @classmethod
    def panels(cls, reports: Sequence[LatentReport]) -> list[kit.Panel]:
        """TFLOP/s of queued calls over the length."""
        title = "{0.work} n={0.heads} [TFLOP/s]"
        return cls.over(reports, title, "queued_tflops", "tokens", "tokens")


class LatentBenchmark(kit.InTurns):
    """All implementations of an input in turns."""

    report = LatentReport
    options = kit.declare(
        "json plot render only device heads=16,128 seq_lens=8k,16k,32k seconds_per_row=0.15 "
        "time_limit=80 seed=1234",
        works=kit.some("what to measure", IMPLEMENTATIONS),
        implementations=kit.some("whose, separated by ;", EVERY, separator=";"),
        dims=kit.DIMS,
    )
    quick = "--seq-lens 40"
    recorded = ("dims", "ceilings")

    def prepare(self) -> None:
        """Demand what deterministic products need, before cuBLAS starts and reads it."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        super().prepare()

    def cases(self) -> list[LatentCase]:
        """Forward first, short sequences first."""
        args = self.args
        return [
            LatentCase(work, heads, tokens, implementation)
            for work in args.works
            for heads in args.heads
            for tokens in sorted(args.seq_lens)
            for implementation in IMPLEMENTATIONS[work]
            if implementation in args.implementations
        ]

    def begin(self, case: LatentCase) -> None:
        """Forget the outputs of another input."""
        self.now.outputs = {}

    def work(self, case: LatentCase) -> Repeated:
        """The call, whose output is kept."""
        from benchmarks.kit.timing import Repeated

        run = self._call(case)
        self.now.outputs[case] = run().detach().float()
        return Repeated(run, on_gpu=self.processes.on_gpu)

    def together(self, works: Mapping[Any, Repeated]) -> dict[Any, Row]:
        """Queued calls in turns, then those that the host waits for."""
        rows, repeated = super().together(works), [*works.values()]
        called = self._called(repeated, rows[next(iter(works))].times.repetitions)
        return {
            case: dataclasses.replace(row, called=kit.Times.of(seconds))
            for (case, row), seconds in zip(rows.items(), called)
        }

    def timed(self, case: LatentCase, times: kit.Times) -> Row:
        """Of a queued call."""
        first = next(iter(self.now.outputs.values()))
        off = float((self.now.outputs[case] - first).abs().max() / first.abs().max())
        forward, backward = attention_flops(_core(case), kit.dims_of(self.args))
        flops = forward if case.work == "forward" else backward
        return Row(case=case, times=times, more={"flops": flops, "difference": off})

    def _called(self, works: Sequence[Repeated], count: int) -> list[list[float]]:
        """Seconds until the end of every call, which the host waits for; all in turns."""
        seconds: list[list[float]] = [[] for _ in works]
        for turn in range(count):
            for work, found in [*zip(works, seconds)][:: -1 if turn % 2 else 1]:
                self.processes.synchronize()
                begin = time.perf_counter()
                work.forward()
                self.processes.synchronize()
                found.append(time.perf_counter() - begin)
        return seconds

    def _call(self, case: LatentCase) -> Callable[[], Tensor]:
        """What is timed; its result is the output, or the gradient of the latent."""
        core = _core(case)
        self.processes.reseed(self.args.seed)
        if case.implementation == _PEER:
            return self._peer(core)
        name = case.implementation.removesuffix(", deterministic")
        core = dataclasses.replace(core, implementation=name)
        attention = build_core(core, self.args, self.processes)
        if case.work == "forward":
            return lambda: attention.forward().out
        attended = attention.forward()

        def backward() -> Tensor:
            with deterministic(case.implementation == _DETERMINISTIC):
                return attention.backward(attended).k_content

        return backward

    def _peer(self, core: CoreCase) -> Callable[[], Tensor]:
        require_flash_attention_3()
        dims = kit.dims_of(self.args)
        q_content, q_rope, latent, k_rope, _ = random_inputs(core, dims, self.processes)
        bounds = torch.tensor([0, core.tokens], dtype=torch.int32, device=latent.device)
        scale = (dims["qk-head-dim"] + dims["qk-pos-emb-head-dim"]) ** -0.5
        assert pair_widths("absorbed", dims)[1] == latent.shape[-1]
        parts = q_rope[:, 0], k_rope[:, 0, None], latent[:, 0], q_content[:, 0]
        return lambda: flash_attention_3(
            *parts,
            scale,
            cu_seqlens=bounds,
            cu_seqlens_k=bounds,
            max_seqlen=core.tokens,
            num_splits=1,
        )[:, None]


def _core(case: LatentCase) -> CoreCase:
    return CoreCase(case.implementation, "absorbed", case.heads, case.tokens)


@contextlib.contextmanager
def deterministic(demanded: bool) -> Iterator[None]:
    """Demand deterministic algorithms of PyTorch inside the block, or demand nothing."""
    torch.use_deterministic_algorithms(demanded)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


if __name__ == "__main__":
    kit.main(LatentBenchmark)
