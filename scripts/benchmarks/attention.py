#!/usr/bin/env python3
"""Measure MLA on one GPU: whole layers beside Megatron's own, and attention beside its peers.

    $ python scripts/benchmarks/attention.py docs/measurements/attention
    $ python scripts/benchmarks/attention.py /tmp/quick --suite layer --layouts sbhd --seq-lens 4k
    $ python scripts/benchmarks/attention.py RESULTS --render one.json other.json

Suite "layer": AbsorbedMLASelfAttention, with and without recomputation of mla_up_proj, beside
Megatron's MLASelfAttention of TransformerEngine's layers: time of forward and of a step, memory
allocated by forward for backward ("kept"), peak memory. Each row is compared with Megatron's of the
same recomputation.
Suite "core": attention without projections, expanded and absorbed, by our backends, PyTorch's,
TransformerEngine's and FlashAttention's. A causal sequence of S tokens and N heads counts

    pairs    = N * S^2 / 2
    forward  = pairs * 2 * (key + value) FLOP         expanded: key = nope + rope, value = v
    backward = pairs * 2 * (3 * key + 2 * value)      absorbed: key = latent + rope, value = latent

where backward is the five products S, dP, dV, dQ, dK; recomputation inside a kernel does not count.

The dimensions are DeepSeek-V3's; a GPU computes in bfloat16, a CPU in float32. The most important
cases come first, because --time-limit leaves out the last ones. Output:

    12.3 s  ours recompute n=16 S=8192 sbhd (expanded, cudnn): step_ms 7.1, step of megatron's 0.95
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import core_attention, kit
from benchmarks.core_attention import FORMS, IMPLEMENTATIONS, CoreCase, attention_flops
from benchmarks.kit.tables import gibibytes

if TYPE_CHECKING:
    from benchmarks.kit.layers import Subject
    from benchmarks.kit.processes import Processes

LAYOUTS = ("sbhd", "thd")
# Of linear layers: the device's plain one, or FP8 with these scales (Megatron's fp8_recipe).
PLAIN = "bf16"
PRECISIONS = (PLAIN, "tensorwise", "blockwise", "delayed")
LAYER_TOKENS = "4k,8k,16k,32k,64k"
CORE_TOKENS = "8k,32k"


def precisions_option(default: str) -> kit.Option:
    """``--precisions`` of a benchmark."""
    text = "of the linear layers: bf16 (fp32 on a CPU), or FP8 with these scales, on a GPU"
    return kit.some(text, PRECISIONS, default)


@dataclass(frozen=True)
class LayerCase(kit.Case):
    """One attention layer with its projections, and its input."""

    text = "{0.implementation}{0.again} n={0.heads} S={0.tokens} {0.layout}{0.fp8}"
    implementation: str  # "ours" or "megatron"
    recompute: bool  # whether mla_up_proj is recomputed in backward
    heads: int
    tokens: int  # of the sequence or pack
    layout: str  # "sbhd", or "thd": a pack of documents of mixed lengths
    precision: str = "bf16"  # of the linear layers: PLAIN, or the recipe of FP8's scales

    @property
    def again(self) -> str:
        """For the name."""
        return " recompute" if self.recompute else ""

    @property
    def fp8(self) -> str:
        """For the name."""
        return "" if self.precision == PLAIN else f" fp8 {self.precision}"

    @property
    def plotted_as(self) -> str:
        """By what both layers recompute."""
        return ("both layers recompute" if self.recompute else "neither recomputes") + self.fp8


Case = LayerCase | CoreCase


def document_lengths(tokens: int, seed: int) -> list[int]:
    """Mixed lengths that sum to ``tokens``, the same for the same arguments.

    From single tokens to half of the pack, most of them short.
    """
    draw = random.Random(f"{seed} {tokens}")
    lengths, left = [], tokens
    while left:
        length = min(left, max(1, round(tokens * 0.5 * draw.random() ** 3)))
        lengths.append(length)
        left -= length
    return lengths


@dataclass(frozen=True, kw_only=True)
class Row(kit.Row):
    """One case, with its figures or with the error that prevented them."""

    forward: kit.Times | None = None  # None if it was not measured, as the next ones
    backward: kit.Times | None = None  # likewise
    step: kit.Times | None = None  # forward and backward
    kept_bytes: int | None = None  # allocated by forward until backward; None without a GPU
    # The most allocated in a step beyond weights, input and output gradient; None without a GPU.
    peak_bytes: int | None = None
    ran: str = ""  # form and backend that a layer of ours chose

    @property
    def suite(self) -> str:
        """``"layer"`` or ``"core"``."""
        return "layer" if isinstance(self.case, LayerCase) else "core"

    @property
    def compared(self) -> tuple:
        """Input, recomputation and precision of a layer; nothing else compares with a core."""
        return () if self.suite == "core" else self.case.input


def measure_layer(case: LayerCase, args: argparse.Namespace, processes: Processes) -> dict:
    """Times and memory of a layer, for the row of the case."""
    from benchmarks.kit.chosen_backends import ChosenBackends
    from benchmarks.kit.layers import observe
    from benchmarks.kit.timing import Repeated

    subject = build_layer(case, args, processes)
    ran = ChosenBackends(subject.layer)
    # The first step compiles, and allocates what stays allocated.
    subject.backward(subject.forward())
    subject.forget_gradients()
    processes.synchronize()
    begin = time.perf_counter()
    observed = observe(subject, processes)
    duration = time.perf_counter() - begin
    repeated = Repeated.of(subject, on_gpu=processes.on_gpu)
    return {
        **core_attention.named_times(repeated.times(duration, args.seconds_per_row)),
        "kept_bytes": observed.kept_bytes,
        "peak_bytes": observed.peak_bytes,
        "ran": str(ran),
    }


def build_layer(case: LayerCase, args: argparse.Namespace, processes: Processes) -> Subject:
    """The layer with its input.

    Raises:
        Refused: If it cannot be built here.
    """
    from absorbed_mla import AbsorbedMLAOptions
    from benchmarks.kit import layers

    recompute = "mla_up_proj" if case.recompute else None
    recipe = None if case.precision == PLAIN else case.precision
    config = layers.layer_config(
        args, processes, heads=case.heads, recompute=recompute, fp8_recipe=recipe
    )
    options = packed = None
    if case.implementation == "ours":
        config.mla_down_proj_fusion = args.fused_down
        options = AbsorbedMLAOptions()
    if case.layout == "thd":
        packed = layers.pack(document_lengths(case.tokens, args.seed), processes.device)
    return layers.build(config, options, processes, case.tokens, packed)


class AttentionReport(kit.Report):
    """One run; ratios of a layer are to Megatron's, rates of an attention in TFLOP/s."""

    row, case = Row, Case
    plotted = (
        ("step of megatron's, {0.layout}, {0.heads} heads", "step of megatron's", "tokens"),
        ("kept of megatron's, {0.layout}, {0.heads} heads", "kept of megatron's", "tokens"),
        ("{0.form}, forward, {0.heads} heads [TFLOP/s]", "forward TFLOP/s", "tokens"),
        ("{0.form}, backward, {0.heads} heads [TFLOP/s]", "backward TFLOP/s", "tokens"),
    )

    def of(self, suite: str) -> list[Row]:
        """Rows of a suite with times; backward may have failed."""
        return [row for row in self.rows if row.suite == suite and row.forward is not None]

    def quantities(self, row: Row) -> dict[str, float | None]:
        """Times of forward and step, and kept memory."""
        times = {name: getattr(row, name) for name in ("forward", "step")}
        medians = {name: one and one.median for name, one in times.items()}
        return {**medians, "kept": row.kept_bytes}

    def tflops(self, row: Row) -> dict[str, float]:
        """Of an attention alone: of forward, backward and both."""
        forward, backward = attention_flops(row.case, self.environment["dims"])
        counts = {"forward": forward, "backward": backward, "step": forward + backward}
        times = {name: getattr(row, name) for name in counts}
        return {name: counts[name] / one.median / 1e12 for name, one in times.items() if one}

    def figures(self, row: Row) -> dict[str, float]:
        """Rates of an attention alone; milliseconds, memory and ratios of a layer."""
        if row.suite == "core":
            return {f"{name} TFLOP/s": value for name, value in self.tflops(row).items()}
        times = {f"{name}_ms": 1e3 * getattr(row, name).median for name in ("forward", "step")}
        ratios = {f"{name} of megatron's": value for name, value in self.ratios(row).items()}
        return times | gibibytes(row) | ratios


class AttentionBenchmark(kit.Benchmark):
    """Layers and attention alone."""

    files = "attention"
    report = AttentionReport
    options = kit.declare(
        "folder render only device heads=128,16 seconds_per_row=0.5 time_limit=240 seed=1234",
        suite=kit.one("what to measure", ("layer", "core", "all"), "all"),
        seq_lens=kit.sizes(
            "tokens of a sequence or pack "
            f"(default: {LAYER_TOKENS} for layers, {CORE_TOKENS} for attention alone)"
        ),
        layouts=kit.some(
            "input layouts of the layers: sbhd (one sequence), thd (a pack of documents)", LAYOUTS
        ),
        precisions=precisions_option(PLAIN),
        fused_down=kit.flag("our layer with mla_down_proj_fusion"),
        dims=kit.DIMS,
    )
    quick = "--seq-lens 48"
    recorded = ("dims", "fused_down", "ceilings")

    def cases(self) -> list[Case]:
        """All cases, the most important first."""
        args = self.args
        layers: list[Case] = [
            LayerCase(implementation, recompute, heads, tokens, layout, precision)
            for recompute in (True, False)
            for tokens in sorted(args.seq_lens or kit.parse_sizes(LAYER_TOKENS))
            for heads in sorted(args.heads)
            for layout in args.layouts
            for precision in args.precisions
            for implementation in ("megatron", "ours")
        ]
        cores: list[Case] = [
            CoreCase(implementation, form, heads, tokens)
            for tokens in sorted(args.seq_lens or kit.parse_sizes(CORE_TOKENS))
            for heads in sorted(args.heads)
            for form in FORMS
            for implementation in IMPLEMENTATIONS
        ]
        return {"layer": layers, "core": cores, "all": layers + cores}[args.suite]

    def measure(self, case: Case) -> Row:
        """Times of a case, of a layer its memory, too.

        Raises:
            Refused: If it is not supported.
        """
        of_core = isinstance(case, CoreCase)
        measure: Any = core_attention.measure_core if of_core else measure_layer
        return Row(case=case, **measure(case, self.args, self.processes))


if __name__ == "__main__":
    kit.main(AttentionBenchmark)
