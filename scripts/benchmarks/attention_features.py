#!/usr/bin/env python3
"""Measure what sinks, sliding windows and output gates cost, beside the same without them.

    $ python scripts/benchmarks/attention_features.py docs/measurements/attention
    $ python scripts/benchmarks/attention_features.py /tmp/sinks --only sinks --heads 16
    $ python scripts/benchmarks/attention_features.py RESULTS --render attention_features.json

One causal sequence with the feature and without it, computed in turns. Attention alone has no
projections; layers are DeepSeek-V3's attention in the form that "auto" takes. "step" is forward and
backward with the feature over that without, "forward" likewise; "pairs" is the share of pairs of a
query and a key that a window leaves, which its time can reach. Output:

    12.3 s  attention alone, expanded, sinks n=128 S=8192 (hopper_expanded): step 1.04, forward 1.03
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import core_attention, kit
from benchmarks.core_attention import CoreCase, pair_widths

torch: Any = kit.lazy("torch")
CORE = "attention alone, "
WORKS = (CORE + "expanded", CORE + "absorbed", "attention layer")
SINKS, WINDOW, GATE = "sinks", "window", "gate "
FEATURES = (SINKS, WINDOW, f"{GATE}headwise", f"{GATE}elementwise")


@dataclass(frozen=True)
class FeatureCase(kit.Case):
    """A feature in one attention or layer."""

    text = "{0.work}, {0.name} n={0.heads} S={0.tokens}"
    work: str  # one of WORKS
    feature: str  # one of FEATURES
    window: int | None  # keys that a query sees, its own included
    heads: int
    tokens: int

    @property
    def name(self) -> str:
        """Of the feature."""
        return f"{WINDOW} {self.window}" if self.window else self.feature

    @property
    def plotted_as(self) -> str:
        """By work and feature."""
        return f"{self.work}, {self.name}"

    @property
    def pairs(self) -> float:
        """Share of the causal pairs that it leaves."""
        window = min(self.window or self.tokens, self.tokens)
        return window * (2 * self.tokens - window + 1) / (self.tokens * (self.tokens + 1))

    def fields(self) -> dict[str, Any]:
        """Of Megatron's config."""
        if self.window:
            return {"window_size": (self.window - 1, 0)}
        return {"softmax_type": "learnable"} if self.feature == SINKS else {}

    def options(self) -> dict[str, Any]:
        """Of ``AbsorbedMLAOptions``."""
        gate = self.feature.startswith(GATE)
        return {"attention_output_gate": self.feature.removeprefix(GATE)} if gate else {}


class FeatureReport(kit.Report):
    """One run; ratios are to the same without the feature."""

    row, case = kit.RanRow, FeatureCase
    plotted = tuple(
        (f"{name} of the same without, {{0.heads}} heads", name, "tokens")
        for name in ("step", "forward")
    )


class FeatureBenchmark(kit.Benchmark):
    """Every feature beside the same without it."""

    files = "attention_features"
    report = FeatureReport
    options = kit.declare(
        "folder render only device heads=128,16 time_limit=90 seed=1234",
        features=kit.some("features, separated by commas", FEATURES),
        windows=kit.sizes("keys of a window", "512,4k"),
        seq_lens=kit.sizes("tokens of the sequence", "4k,16k"),
        rounds=kit.number("steps of each that are timed", 5),
        dims=kit.DIMS,
    )
    quick = "--seq-lens 24 --windows 5,32 --rounds 1"
    recorded = ("dims", "ceilings")

    def cases(self) -> list[FeatureCase]:
        """A gate is the layer's, and a window shorter than the sequence."""
        args = self.args
        return [
            FeatureCase(work, feature, window, heads, tokens)
            for work in WORKS
            for tokens in args.seq_lens
            for heads in args.heads
            for feature in args.features
            for window in (args.windows if feature == WINDOW else [None])
            if work == WORKS[-1] or not feature.startswith(GATE)
            if (window or 0) < tokens
        ]

    def measure(self, case: FeatureCase) -> kit.RanRow:
        """Both in turns.

        Raises:
            Refused: If it cannot run here.
        """
        from benchmarks.kit.timing import Repeated, medians_in_turns

        pair, ran = (self.core if case.work.startswith(CORE) else self.layer)(case)
        works = [Repeated.of(one, on_gpu=self.processes.on_gpu) for one in pair]
        for work in works:
            work.once()
        with_it, without = medians_in_turns(works, self.args.rounds)
        more = {name.removesuffix("_ms"): x / without[name] for name, x in with_it.items()}
        more |= {"pairs": case.pairs} if case.window else {}
        more |= with_it | {f"without: {name}": x for name, x in without.items()}
        return kit.RanRow(case=case, more=more, ran=str(ran))

    def core(self, case: FeatureCase) -> tuple[list, str]:
        """Attention alone with the feature and without it, and its backend."""
        dims, form = kit.dims_of(self.args), case.work.removeprefix(CORE)
        core = CoreCase("ours", form, case.heads, case.tokens)
        inputs = core_attention.random_inputs(core, dims, self.processes)
        width = pair_widths(form, dims)[1]
        grad = self.processes.random(case.tokens, 1, case.heads, width)
        build = partial(core_attention.our_attention, "auto", form, dims, inputs, grad)
        plain = build()
        if case.window:
            return [build(window=case.window), plain], plain.ran
        return [build(sink=self.processes.random(case.heads)), plain], plain.ran

    def layer(self, case: FeatureCase) -> tuple[list, Any]:
        """A layer with the feature and one without it, and the form and backend that it takes."""
        from absorbed_mla import AbsorbedMLAOptions
        from benchmarks.kit import layers
        from benchmarks.kit.chosen_backends import ChosenBackends

        pair: list[Any] = []
        for fields, options in ((case.fields(), case.options()), ({}, {})):
            config = layers.layer_config(
                self.args, self.processes, heads=case.heads, recompute=None
            )
            vars(config).update(fields)
            ours = AbsorbedMLAOptions(**options)
            pair.append(layers.build(config, ours, self.processes, case.tokens, None))
        return pair, ChosenBackends(pair[0].layer)


if __name__ == "__main__":
    kit.main(FeatureBenchmark)
