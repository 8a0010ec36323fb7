#!/usr/bin/env python3
"""Measure whole training steps of whole models on one GPU, ours beside Megatron's, in turns.

    $ python scripts/benchmarks/training_step.py docs/measurements/training-step
    $ python scripts/benchmarks/training_step.py /tmp/steps --rows v3/4k,v3/16k/thd --recompute no

A step is what Megatron's loop does of one microbatch: forward and backward through its schedule,
DDP with fp32 gradients, clipping, its distributed optimizer. Models have the widths of DeepSeek-V3
or -V2-Lite and fewer layers, experts and rows of the vocabulary: those of one rank. "megatron" is
GPTModel with MLASelfAttention and TransformerEngine's layers, "ours" the same model with our
decoder block, options at their defaults; "-graphs" replay --graph-modules of every layer in
TransformerEngine's CUDA graphs. Ours begins with Megatron's weights, and its loss is compared.

step_ms is the wall time until the device is idle, device_ms that between CUDA events, host_ms until
the call returns; medians. peak_gib has weights, gradients and optimizer in it. FLOPs are three
times forward's, of attention over causal pairs, of routed experts; MFU is of bf16's rate (PEAK_TFLOPS). One
more step is profiled: "idle" is the device's share of step_ms without a kernel, wait_ms the host's
time in calls that wait, and lines where operators wait follow. Output:

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
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit
from benchmarks.attention import PLAIN, PRECISIONS
from benchmarks.kit.arguments import parse_size
from benchmarks.kit.tables import gibibytes
from training.presets import get_preset, scale_down

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from benchmarks.kit.processes import Device
    from benchmarks.kit.training import Batch, Sample, Trainer

torch: Any = kit.lazy("torch")
GRAPHS = "-graphs"
IMPLEMENTATIONS = ("megatron", "ours", "ours" + GRAPHS, "megatron" + GRAPHS)
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
# bf16, dense, as NVIDIA states it for the SXM boards.
PEAK_TFLOPS = {"H100": 989.4, "H200": 989.4}
# Of the losses from the same weights: what bf16 leaves, and fp32.
_MOST_DIFFERENCE = {"cuda": 2e-2, "cpu": 1e-4}


class Size(NamedTuple):
    """Of a model and its batch."""

    width: str  # of WIDTHS
    tokens: int
    layout: str  # "sbhd", or "thd": a pack of documents


def parse_row(text: str) -> Size:
    """``"v3/16k"`` or ``"v3/16k/thd"``."""
    width, _, rest = text.strip().partition("/")
    tokens, _, layout = rest.partition("/")
    layout = layout or LAYOUTS[0]
    if width not in WIDTHS or layout not in LAYOUTS:
        accepted = f"{' or '.join(WIDTHS)}, tokens, and {' or '.join(LAYOUTS)}"
        raise argparse.ArgumentTypeError(
            f"expected rows such as v3/16k or v3/16k/thd, of {accepted}; got {text!r}"
        )
    return Size(width, parse_size(tokens), layout)


@dataclass(frozen=True)
class StepCase(kit.Case):
    """One model and its batch."""

    text = "{0.implementation} {0.width} S={0.tokens} {0.layout}{0.again}{0.fp8}"
    implementation: str
    width: str
    tokens: int
    layout: str
    recompute: bool  # whether mla_up_proj is recomputed in backward
    precision: str = PLAIN  # of the linear layers, see attention.PRECISIONS

    @property
    def again(self) -> str:
        """For the name."""
        return " recompute" if self.recompute else ""

    @property
    def fp8(self) -> str:
        """For the name."""
        return "" if self.precision == PLAIN else f" fp8 {self.precision}"

    @property
    def model(self) -> tuple:
        """Cases in which it is equal can have the same models."""
        return self.width, self.recompute, self.precision

    @property
    def plotted_as(self) -> str:
        """Implementation and what is computed."""
        return f"{self.implementation} {self.layout}{self.again}{self.fp8}"


@dataclass(frozen=True, kw_only=True)
class Row(kit.TimedRow):
    """One case; times are wall times, ``more`` has further figures."""

    peak_bytes: int | None = None  # with the state; None without a GPU, as the next one
    state_bytes: int | None = None  # weights, gradients, optimizer: allocated between steps
    waits: dict = field(default_factory=dict)  # calls and lines at which the host waits
    ran: str = ""  # forms and backends of our attentions

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
        step = row.times.median
        more = {name: x for name, x in row.more.items() if x is not None}
        ratios = {f"{name} of megatron's": value for name, value in self.ratios(row).items()}
        found = {"step_ms": 1e3 * step, **ratios, "tokens/s": row.case.tokens / step}
        peak, busy = self.environment.get("peak_tflops"), more.get("busy_ms")
        if peak:
            found["mfu"] = more["flops"] / step / 1e12 / peak
        if busy is not None:
            found["idle"] = max(0.0, 1 - busy / 1e3 / step)
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
        "folder render only device time_limit=150 seed=1234",
        rows=kit.Option(
            "widths/tokens/layout, in this order; the layout is sbhd or thd (a pack of documents)",
            kit.list_of(parse_row),
            ROWS,
        ),
        implementations=kit.some(
            "what to measure", IMPLEMENTATIONS, ",".join(IMPLEMENTATIONS[:3])
        ),
        recompute=kit.some("whether mla_up_proj is recomputed in backward", ("yes", "no")),
        precisions=kit.some(
            "of the linear layers: bf16 (fp32 on a CPU), or FP8 with these scales, on a GPU",
            PRECISIONS,
            f"{PLAIN},tensorwise",
        ),
        warm_ups=kit.number("steps before those that are timed", 3),
        steps=kit.number("steps that are timed", 8),
        document=kit.number("mean tokens of a document of a pack", 1000),
        moe_layers=kit.number("MoE layers behind a dense one (default: 1 of v3, 7 of v2-lite)"),
        experts=kit.number("routed experts of a layer, those of one rank", 8),
        vocab_size=kit.number("rows of embedding and output layer", 16384),
        scale_down=kit.number("divide all widths by this", 1),
        graph_modules=kit.Option(
            "cuda_graph_modules of contenders with graphs", kit.list_of(str), "attn"
        ),
        unfused=kit.some("fusions to switch off in all", FUSIONS, None),
    )
    quick = (
        "--rows v3/32,v3/32/thd --recompute yes --precisions bf16 --warm-ups 1 --steps 2 "
        "--document 8 --moe-layers 1 --experts 4 --vocab-size 64 --scale-down 64"
    )
    recorded = (
        *("warm_ups", "steps", "document", "moe_layers", "experts", "vocab_size", "scale_down"),
        *("graph_modules", "unfused", "ceilings"),
    )

    def prepare(self) -> None:
        """Processes, with random numbers that graphs can have."""
        super().prepare()
        self._model: tuple = ()
        self._trainers: dict[str, Trainer] = {}
        self._graphs_failed = ""
        if self.processes.on_gpu:
            from megatron.core import tensor_parallel

            tensor_parallel.model_parallel_cuda_manual_seed(
                self.args.seed, use_cudagraphable_rng=True, force_reset_rng=True
            )

    def about(self) -> dict:
        """The peak rate with the rest; on a CPU there is none."""
        found, name = super().about(), ""
        if self.processes.on_gpu:
            name = torch.cuda.get_device_name()
        peaks = [rate for board, rate in PEAK_TFLOPS.items() if board in name]
        return found | {"peak_tflops": peaks[0] if peaks else None}

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
            self._trainers.clear()
            self.clean()
            # Megatron's has the layers of the first model.
            destroy_moe_metrics_tracker()
            self._model = case.model
        self.now.lengths = lengths_of(case, self.args)
        self.now.batch = make_batch(self.now.lengths, self.args, self.processes)

    def _measure(self, cases: list[StepCase]) -> dict[StepCase, Row]:
        """Those without graphs in turns, then each with graphs, whose memory is its own."""
        graphed = [[case] for case in cases if case.implementation.endswith(GRAPHS)]
        plain = [case for case in cases if [case] not in graphed]
        rows: dict[StepCase, Row] = {}
        for some in filter(None, (plain, *graphed)):
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
        samples: dict[StepCase, list[Sample]] = {case: [] for case in cases}
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
        graphed, name = case.implementation.endswith(GRAPHS), case.implementation.split("-")[0]
        if graphed and (case.layout == "thd" or case.precision != PLAIN):
            raise kit.Refused("packs and FP8 are not captured in CUDA graphs")
        if graphed and self._graphs_failed:
            raise kit.Refused(f"left out: a capture failed before, {self._graphs_failed}")
        if name not in self._trainers:
            self._trainers[name] = self._build(case, name)
        trainer = self._trainers[name]
        trainer.batch = self.now.batch
        if graphed:
            # Kernels are compiled, and tables made, outside of the capture.
            trainer.step()
            self._capture(name, stack)
        for _ in range(self.args.warm_ups):
            trainer.step()
        return trainer

    def _capture(self, name: str, stack: contextlib.ExitStack) -> None:
        """Of a trainer; after a failure it may be in any state, and Megatron, too."""
        try:
            stack.enter_context(self._trainers[name].graphs())
        except kit.Refused:
            raise
        except self.errors as error:
            self._graphs_failed = kit.reason(error)
            del self._trainers[name]
            # Not of its own type, by which the device would be given up.
            raise RuntimeError(self._graphs_failed) from None

    def _build(self, case: StepCase, name: str) -> Trainer:
        """A contender that has made one step, compared with Megatron's from the same weights.

        Raises:
            Refused: If it cannot be built here.
            ArithmeticError: If the losses differ.
        """
        from absorbed_mla.standard_mla import get_standard_mla_decoder_block_spec
        from benchmarks.kit.training import Trainer
        from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec

        config, on_gpu = model_config(case, self.args, self.processes), self.processes.on_gpu
        make = get_absorbed_mla_decoder_block_spec
        if name == "megatron":
            make = get_standard_mla_decoder_block_spec
        with kit.refusing(ValueError):
            spec = make(config, backend=config.transformer_impl)
        before = torch.cuda.memory_allocated() if on_gpu else 0
        peer = self._trainers.get("megatron")
        weights = peer and peer.model.state_dict()
        trainer = Trainer(config, spec, self.args.vocab_size, self.processes, weights)
        # Until graphs are made their rules are not in force.
        config.cuda_graph_impl = "none"
        trainer.batch = self.now.batch
        trainer.step()
        trainer.state_bytes = torch.cuda.memory_allocated() - before if on_gpu else None
        if peer:
            peer.batch = self.now.batch
            peer.step()
            ours, theirs = trainer.loss.item(), peer.loss.item()
            trainer.difference = abs(ours - theirs) / theirs
            if not trainer.difference <= _MOST_DIFFERENCE[self.processes.device.type]:
                raise ArithmeticError(f"the losses are {ours:.6g} and Megatron's {theirs:.6g}")
        return trainer

    def _row(self, case: StepCase, trainer: Trainer, samples: list[Sample]) -> Row:
        from benchmarks.kit.training import idle_pool_bytes, profile, step_flops, waiting_lines

        wall, host, device, peak = zip(*samples)
        state, waits = trainer.state_bytes, {}
        more = {"host_ms": 1e3 * kit.Times.of(host).median, "loss": trainer.loss.item()}
        more["flops"] = step_flops(trainer.config, self.args.vocab_size, self.now.lengths)
        more["difference"] = trainer.difference
        if self.processes.on_gpu:
            more["device_ms"] = 1e3 * kit.Times.of(device).median
            state += idle_pool_bytes() if case.implementation.endswith(GRAPHS) else 0
            profiled = profile(trainer)
            waits = profiled.pop("waits") | waiting_lines(trainer)
            more |= profiled
        return Row(
            case=case,
            times=kit.Times.of(wall),
            more=more,
            state_bytes=state,
            peak_bytes=state and state + max(peak),
            waits=waits,
            ran=str(trainer.ran),
        )


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
    graphs = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": args.graph_modules}
    model = scale_down(get_preset(preset), args.scale_down)
    known = {one.name for one in fields(MLATransformerConfig)}
    given = {name: x for name, x in model.items() if name in known and x is not None}
    given |= {name: fused and name not in (args.unfused or ()) for name in FUSIONS}
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


def lengths_of(case: StepCase, args: argparse.Namespace) -> list[int]:
    """Of the documents of a batch, the same for the same arguments."""
    if case.layout == "sbhd":
        return [case.tokens]
    draw, lengths, left = random.Random(f"{args.seed} {case.tokens}"), [], case.tokens
    while left:
        lengths.append(min(left, max(1, round(draw.expovariate(1 / args.document)))))
        left -= lengths[-1]
    return lengths


def make_batch(lengths: list[int], args: argparse.Namespace, device: Device) -> Batch:
    """Random tokens of documents one after the other, whose labels are the next ones."""
    from benchmarks.kit.layers import pack
    from benchmarks.kit.training import Batch

    make = torch.Generator().manual_seed(args.seed)
    drawn = torch.randint(args.vocab_size, (1, sum(lengths) + 1), generator=make)
    drawn = drawn.to(device.device)
    positions = torch.arange(sum(lengths), device=device.device)[None]
    packed = pack(lengths, device.device) if len(lengths) > 1 else None
    return Batch(drawn[:, :-1].contiguous(), positions, drawn[:, 1:].contiguous(), packed)


if __name__ == "__main__":
    kit.main(StepBenchmark)
