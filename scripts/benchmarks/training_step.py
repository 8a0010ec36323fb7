#!/usr/bin/env python3
"""Measure whole training steps of whole models on one GPU, ours beside Megatron's, in turns.

    $ python scripts/benchmarks/training_step.py docs/measurements/training-step
    $ python scripts/benchmarks/training_step.py /tmp/steps --rows v3/4k,v3/16k/thd --recompute no

A step is what Megatron's loop does of one microbatch: forward and backward through its schedule,
DDP with fp32 gradients, clipping, its distributed optimizer. Models have the widths of DeepSeek-V3
or -V2-Lite, and of layers, experts and vocabulary what one rank holds. "megatron" is GPTModel with
MLASelfAttention and TransformerEngine's layers, "ours" the same with our decoder block, options at
their defaults; "-graphs" replay the attention of every layer in TransformerEngine's CUDA graphs.
Ours begins with Megatron's weights; losses are compared.

step_ms is the wall time until the device is idle, device_ms that between CUDA events, host_ms until
the call returns: medians. peak_gib has weights, gradients and optimizer in it. FLOPs are three
times forward's, of attention over causal pairs, of routed experts; MFU is of bf16's rate. "idle" is
the device's share of step_ms without a kernel; kernels, launches, wait_ms (the host in calls that
wait) and what it waits for are those of one more step in the profiler. Output:

    12.3 s  ours v3 S=4096 sbhd recompute: step_ms 130, step of megatron's 0.9, mfu 0.4, ...
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit
from benchmarks.attention import PLAIN, precisions_option
from benchmarks.kit.arguments import parse_size
from benchmarks.kit.tables import gibibytes
from training.presets import get_preset, scale_down

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from benchmarks.kit.processes import Device
    from benchmarks.kit.training import Trainer

torch: Any = kit.lazy("torch")
GRAPHS = "-graphs"
IMPLEMENTATIONS = ("megatron", "ours", "ours" + GRAPHS)
# Preset, and MoE layers behind one dense layer.
WIDTHS = {"v3": ("deepseek-v3", 1), "v2-lite": ("deepseek-v2-lite", 7)}
LAYOUTS = ("sbhd", "thd")
ROWS = "v3/4k,v3/16k,v3/16k/thd,v2-lite/4k,v2-lite/16k/thd,v2-lite/16k"
ROWS += ",v3/4k/thd,v3/64k,v3/64k/thd,v2-lite/4k/thd,v2-lite/64k,v2-lite/64k/thd"
# Of TransformerEngine's models; on a CPU there is none. Gradient accumulation needs APEX.
FUSIONS = (
    *("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion"),
    *("cross_entropy_loss_fusion", "moe_permute_fusion", "moe_router_fusion", "moe_grouped_gemm"),
)
# bf16, dense, as NVIDIA states it for H100 and H200 with SXM.
PEAK_TFLOPS = 989.4
# Tokens of a document of a pack; at most a quarter of the pack.
MEAN_DOCUMENT = 1000
# Of the losses from the same weights: what bf16 leaves, and fp32.
_MOST_DIFFERENCE = {"cuda": 2e-2, "cpu": 1e-4}


def parse_row(text: str) -> tuple[str, int, str]:
    """Width, tokens and layout of ``"v3/16k"`` or ``"v3/16k/thd"``."""
    width, tokens, layout = f"{text.strip()}/{LAYOUTS[0]}//".split("/")[:3]
    if width not in WIDTHS or layout not in LAYOUTS:
        raise argparse.ArgumentTypeError(
            f"expected rows such as v3/16k or v3/16k/thd, of {' or '.join(WIDTHS)}, got {text!r}"
        )
    return width, parse_size(tokens), layout


@dataclass(frozen=True)
class StepCase(kit.Case):
    """One model and its batch."""

    text = "{0.implementation} {0.width} S={0.tokens} {0.layout}{0.what}"
    implementation: str
    width: str
    tokens: int
    layout: str
    recompute: bool  # whether mla_up_proj is recomputed in backward
    precision: str = PLAIN  # of the linear layers, see attention.PRECISIONS

    @property
    def what(self) -> str:
        """For the name."""
        fp8 = "" if self.precision == PLAIN else f" fp8 {self.precision}"
        return (" recompute" if self.recompute else "") + fp8

    @property
    def model(self) -> tuple:
        """Cases in which it is equal have the same models."""
        return self.width, self.recompute, self.precision

    @property
    def contender(self) -> str:
        """The implementation without its graphs."""
        return self.implementation.removesuffix(GRAPHS)

    @property
    def graphed(self) -> bool:
        """Whether layers are CUDA graphs."""
        return self.implementation != self.contender

    @property
    def plotted_as(self) -> str:
        """Implementation and what is computed."""
        return f"{self.implementation} {self.layout}{self.what}"


@dataclass(frozen=True, kw_only=True)
class Row(kit.RanRow):
    """One case; times are wall times, ``more`` has further figures."""

    peak_bytes: int | None = None  # with what is there between steps; None without a GPU
    waits: dict = field(default_factory=dict)  # calls and lines at which the host waits

    @property
    def compared(self) -> tuple:
        """All but the implementation."""
        return self.case.input


class StepReport(kit.Report):
    """One run; ratios are to Megatron's step without graphs."""

    row, case = Row, StepCase
    plotted = (
        ("step of megatron's, {0.width}", "step of megatron's", "tokens"),
        ("peak memory of megatron's, {0.width}", "peak of megatron's", "tokens"),
        ("share of the peak rate, {0.width}", "mfu", "tokens"),
    )

    def quantities(self, row: Row) -> dict[str, float | None]:
        """Time and peak memory of a step."""
        return {"step": row.times and row.times.median, "peak": row.peak_bytes}

    def figures(self, row: Row) -> dict[str, float]:
        """Ratios first, since lines are long."""
        step, more = row.times.median, row.more
        ratios = {f"{name} of megatron's": value for name, value in self.ratios(row).items()}
        found = {"step_ms": 1e3 * step, **ratios, "tokens/s": row.case.tokens / step}
        if "busy_ms" in more:
            found["mfu"] = more["flops"] / step / 1e12 / self.environment["peak_tflops"]
            found["idle"] = max(0.0, 1 - more["busy_ms"] / 1e3 / step)
        return found | gibibytes(row) | more

    def line(self, row: Row) -> str:
        """With what the host waits for."""
        most = [f"{name} x{number}" for name, number in [*row.waits.items()][:4]]
        return super().line(row) + (f"; waits: {', '.join(most)}" if most else "")


class StepBenchmark(kit.InTurns):
    """Contenders of one model and batch take turns; rows of one model share the contenders."""

    files = "training_step"
    report = StepReport
    options = kit.declare(
        "folder render only device time_limit=150 seed=1234 experts=8 vocab_size=16384 "
        "scale_down=1",
        rows=kit.Option(
            "widths/tokens/layout, in this order; the layout is sbhd or thd (a pack of documents)",
            kit.list_of(parse_row),
            ROWS,
        ),
        implementations=kit.some("what to measure", IMPLEMENTATIONS),
        recompute=kit.some("whether mla_up_proj is recomputed in backward", ("yes", "no")),
        precisions=precisions_option(f"{PLAIN},tensorwise"),
        warm_ups=kit.number("steps before those that are timed", 3),
        steps=kit.number("steps that are timed", 8),
        moe_layers=kit.number("MoE layers behind a dense one (default: 1 of v3, 7 of v2-lite)"),
    )
    quick = (
        "--rows v3/32,v3/32/thd --recompute yes --precisions bf16 --warm-ups 1 --steps 2 "
        "--moe-layers 1 --experts 4 --vocab-size 64 --scale-down 64"
    )
    recorded = (
        *("warm_ups", "steps", "moe_layers", "experts", "vocab_size", "scale_down", "ceilings"),
    )

    def prepare(self) -> None:
        """Processes, with random numbers that graphs can have."""
        super().prepare()
        self._model: tuple = ()
        self._trainers: dict[str, Trainer] = {}
        self._state: dict[str, int] = {}  # bytes between steps
        self._difference: float | None = None  # of the last losses that were compared
        self._graphs_failed = ""
        if self.processes.on_gpu:
            from megatron.core import tensor_parallel

            tensor_parallel.model_parallel_cuda_manual_seed(
                self.args.seed, use_cudagraphable_rng=True, force_reset_rng=True
            )

    def about(self) -> dict:
        """What MFU is of with the rest."""
        return super().about() | {"peak_tflops": PEAK_TFLOPS}

    def cases(self) -> list[StepCase]:
        """In the order of ``--rows``, first with recomputation, first in bf16."""
        args = self.args
        return [
            StepCase(implementation, *row, again == "yes", precision)
            for precision in args.precisions
            for again in args.recompute
            for row in args.rows
            for implementation in args.implementations
        ]

    def begin(self, case: StepCase) -> None:
        """The batch; models of other widths are freed."""
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

        if case.model != self._model:
            for trainer in self._trainers.values():
                trainer.free()
            self._trainers.clear()
            self.clean()
            # Megatron's has the layers of the first model.
            destroy_moe_metrics_tracker()
            self._model, self._difference = case.model, None
        self.now.lengths = lengths_of(case)
        self.now.batch = make_batch(self.now.lengths, self.args.vocab_size, self.processes)

    def _measure(self, cases: list[StepCase]) -> dict[StepCase, Row]:
        """Those without graphs in turns, then each with graphs, whose memory is its own."""
        rows: dict[StepCase, Row] = {}
        plain = [case for case in cases if not case.graphed]
        for some in (plain, *([case] for case in cases if case.graphed)):
            if some:
                with self._failing(some[-1], rows):
                    self._in_turns(some, rows)
        return rows

    @contextlib.contextmanager
    def _failing(self, case: StepCase, rows: dict[StepCase, Row]) -> Iterator[None]:
        """Make an error that of the case's row, unless it has one."""
        before = len(rows)
        try:
            yield
        except self.errors as error:
            rows.setdefault(case, self.failed(case, error))
        if len(rows) > before:
            self.clean()

    def _in_turns(self, cases: list[StepCase], rows: dict[StepCase, Row]) -> None:
        samples: dict[StepCase, list[dict]] = {case: [] for case in cases}
        with contextlib.ExitStack() as stack:
            ready = {}
            for case in cases:
                with self._failing(case, rows):
                    ready[case] = self._ready(case, stack)
            for turn in range(self.args.steps):
                for case in [*ready][:: -1 if turn % 2 else 1]:
                    with self._failing(case, rows):
                        samples[case].append(ready[case].sample())
                    if case in rows:
                        del ready[case]
            for case, trainer in ready.items():
                with self._failing(case, rows):
                    rows[case] = self._row(case, trainer, samples[case])

    def _ready(self, case: StepCase, stack: contextlib.ExitStack) -> Trainer:
        """The trainer of a case, warmed up; graphs are there as long as the stack."""
        self.require_device()
        if case.graphed and (case.layout == "thd" or case.precision != PLAIN):
            raise kit.Refused("packs and FP8 are not captured in CUDA graphs")
        if case.graphed and self._graphs_failed:
            raise kit.Refused(f"left out: a capture failed before, {self._graphs_failed}")
        if case.contender not in self._trainers:
            self._build(case)
        trainer = self._trainers[case.contender]
        trainer.batch = self.now.batch
        for _ in range(self.args.warm_ups):
            trainer.step()
        if case.graphed:
            # Kernels were compiled, and tables made, outside of the capture.
            self._capture(case, trainer, stack)
        return trainer

    def _capture(self, case: StepCase, trainer: Trainer, stack: contextlib.ExitStack) -> None:
        try:
            stack.enter_context(trainer.graphs())
            for _ in range(self.args.warm_ups):
                trainer.step()
        except kit.Refused:
            raise
        except self.errors as error:
            # It may be in any state now. Not the error's own type, by which the device is given up.
            self._graphs_failed = kit.reason(error)
            self._trainers.pop(case.contender).free()
            raise RuntimeError(self._graphs_failed) from None

    def _build(self, case: StepCase) -> None:
        """A contender that has made one step, compared with Megatron's from the same weights.

        Raises:
            Refused: If it cannot be built here.
            ArithmeticError: If the losses differ.
        """
        from absorbed_mla.standard_mla import get_standard_mla_decoder_block_spec
        from benchmarks.kit.training import Trainer
        from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec

        config, gpu = model_config(case, self.args, self.processes), self.processes.on_gpu
        standard = get_standard_mla_decoder_block_spec, get_absorbed_mla_decoder_block_spec
        with kit.refusing(ValueError):
            spec = standard[case.contender == "ours"](config, backend=config.transformer_impl)
        before = torch.cuda.memory_allocated() if gpu else 0
        peer = self._trainers.get("megatron")
        weights = peer and peer.model.state_dict()
        trainer = Trainer(config, spec, self.args.vocab_size, self.processes, weights)
        # Until graphs are made their rules are not in force.
        config.cuda_graph_impl = "none"
        trainer.batch = self.now.batch
        trainer.step()
        self._state[case.contender] = torch.cuda.memory_allocated() - before if gpu else 0
        if peer:
            peer.batch = self.now.batch
            peer.step()
            losses = trainer.loss.item(), peer.loss.item()
            self._difference = abs(losses[0] / losses[1] - 1)
            if not self._difference <= _MOST_DIFFERENCE[self.processes.device.type]:
                raise ArithmeticError("the losses are {:.6g}, Megatron's {:.6g}".format(*losses))
        self._trainers[case.contender] = trainer

    def _row(self, case: StepCase, trainer: Trainer, samples: list[dict]) -> Row:
        from benchmarks.kit.training import graph_bytes, profile, step_flops

        times = {name: kit.Times.of([one[name] for one in samples]) for name in samples[0]}
        more = {"host_ms": 1e3 * times["host"].median, "loss": trainer.loss.item()}
        more["flops"] = step_flops(trainer.config, self.args.vocab_size, self.now.lengths)
        if case.contender == "ours" and self._difference is not None:
            more["difference"] = self._difference
        waits, state = {}, self._state[case.contender]
        if self.processes.on_gpu:
            state += graph_bytes() if case.graphed else 0
            more |= {"device_ms": 1e3 * times["device"].median, "state_gib": state / 2**30}
            try:
                figures, waits = profile(trainer)
                more |= figures
            except self.errors as error:  # the times are good without
                waits = {f"not profiled, {kit.reason(error)}": 1}
        peak = state + times["peak"].most if "peak" in times else None
        ran, wall = str(trainer.ran), times["wall"]
        return Row(case=case, times=wall, more=more, peak_bytes=peak, waits=waits, ran=ran)


def model_config(case: StepCase, args: argparse.Namespace, device: Device) -> MLATransformerConfig:
    """Of both contenders: a preset with one dense and some MoE layers, those of one rank.

    Raises:
        Refused: If there is no FP8 here.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    preset, moe = WIDTHS[case.width]
    moe, fused = args.moe_layers or moe, HAVE_TE and device.on_gpu
    if case.precision != PLAIN and not fused:
        raise kit.Refused("FP8 needs a GPU and transformer-engine")
    fp8 = {} if case.precision == PLAIN else {"fp8": "hybrid", "fp8_recipe": case.precision}
    graphs = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}
    model = scale_down(get_preset(preset), args.scale_down)
    known = {one.name for one in fields(MLATransformerConfig)}
    given = {name: x for name, x in model.items() if name in known and x is not None}
    given |= dict.fromkeys(FUSIONS, fused)
    given |= {
        "num_layers": 1 + moe,
        "q_lora_rank": model["q_lora_rank"],
        "num_moe_experts": args.experts,
        "moe_layer_freq": [0] + [1] * moe,
        "moe_router_topk": min(model["moe_router_topk"], args.experts),
        # Groups limit the nodes that a token is sent to; this is one of them.
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
    }
    return MLATransformerConfig(
        **given,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=device.dtype,
        bf16=device.dtype == torch.bfloat16,
        transformer_impl="transformer_engine" if fused else "local",
        use_cpu_initialization=not device.on_gpu,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        recompute_granularity="selective" if case.recompute else None,
        recompute_modules=["mla_up_proj"] if case.recompute else None,
        **fp8,
        **(graphs if fused and not fp8 else {}),
    )


def lengths_of(case: StepCase) -> list[int]:
    """Of the documents of a batch, the same for the same arguments."""
    if case.layout == "sbhd":
        return [case.tokens]
    draw, lengths, left = random.Random(case.tokens), [], case.tokens
    mean = min(MEAN_DOCUMENT, case.tokens // 4)
    while left:
        lengths.append(min(left, max(1, round(draw.expovariate(1 / mean)))))
        left -= lengths[-1]
    return lengths


def make_batch(lengths: list[int], vocab_size: int, device: Device) -> dict[str, Any]:
    """Random tokens of documents one after the other, whose labels are the next ones."""
    from benchmarks.kit.layers import pack

    count = sum(lengths)
    drawn = torch.randint(vocab_size, (1, count + 1), generator=torch.Generator().manual_seed(0))
    drawn = drawn.to(device.device)
    return {
        "input_ids": drawn[:, :-1].contiguous(),
        "position_ids": torch.arange(count, device=device.device)[None],
        "attention_mask": None,
        "labels": drawn[:, 1:].contiguous(),
        "packed_seq_params": pack(lengths, device.device) if len(lengths) > 1 else None,
    }


if __name__ == "__main__":
    kit.main(StepBenchmark)
