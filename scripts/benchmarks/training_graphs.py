#!/usr/bin/env python3
"""Measure training steps of a transformer layer in Megatron's CUDA graphs, ours beside Megatron's.

    $ python scripts/benchmarks/training_graphs.py --json docs/attention/graphs.json
    $ python scripts/benchmarks/training_graphs.py --device cpu --heads 2 --seq-lens 16

A layer with attention and a MLP of --ffn-hidden-size, in Megatron's DDP: forward and backward of a
sequence, without optimizer. Layers are of TransformerEngine where it is installed, and Megatron's
``local`` ones otherwise. "graphs" is ``cuda_graph_impl="local"``; on a CPU there are none.

step  wall time of a step, of --steps that are queued one behind the other
host  until the host had queued one

Ours and Megatron's are measured --rounds times in turns. Output:

    14.2 s  ours, graphs, recomputed n=16 S=4096: step 5.16 ms, host 0.75 ms

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.kit import arguments, provenance
from benchmarks.kit.arguments import DIMS, dims_of, parse_sizes
from benchmarks.kit.report import Refused, Report, Times
from benchmarks.kit.run import Benchmark
from console.parser import Parser
from console.script import leave

IMPLEMENTATIONS = ("ours", "megatron")
# Megatron captures behind the first step; a second one sees that the replay is complete.
_WARM_UP = 3


@dataclass(frozen=True)
class Case:
    """One layer.

    Attributes:
        implementation: ``"ours"`` or ``"megatron"``.
        heads: Of the attention.
        tokens: Of the sequence.
        recomputed: Whether ``mla_up_proj`` is.
        graphs: Whether steps are in CUDA graphs.
    """

    implementation: str
    heads: int
    tokens: int
    recomputed: bool
    graphs: bool

    def __str__(self) -> str:
        names = [self.implementation]
        names += ["graphs"] if self.graphs else []
        names += ["recomputed"] if self.recomputed else []
        return f"{', '.join(names)} n={self.heads} S={self.tokens}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case, or why there are no figures of it.

    Attributes:
        case: What was measured.
        times: Of a step in every round.
        host: Until the host had queued one.
        error: Empty, or why figures are missing.
    """

    case: Case
    times: Times | None = None
    host: Times | None = None
    error: str = ""


class GraphsReport(Report):
    """One run."""

    row = Row

    def figures(self, row: Row) -> dict[str, float]:
        """Milliseconds."""
        assert row.times is not None and row.host is not None
        return {"step_ms": 1e3 * row.times.median, "host_ms": 1e3 * row.host.median}


class GraphsBenchmark(Benchmark):
    """Layers in turns, each built anew in every round."""

    script = "training_graphs.py"
    report = GraphsReport

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        arguments.use_device(args.device)
        from megatron.core import tensor_parallel
        from megatron.core.extensions.transformer_engine import HAVE_TE

        from benchmarks.kit.processes import Processes

        self.processes = Processes(args.seed)
        self.layers = "transformer_engine" if HAVE_TE and self.processes.on_gpu else "local"
        tensor_parallel.model_parallel_cuda_manual_seed(
            args.seed,
            te_rng_tracker=self.layers == "transformer_engine",
            use_cudagraphable_rng=self.processes.on_gpu,
            force_reset_rng=True,
        )
        self._rows: dict[Case, Row] = {}

    @classmethod
    def add_options(cls, parser: Parser) -> None:
        """See --help."""
        add = parser.add_argument
        arguments.add_common(parser, render=None, json=None, only=None, device=None, seed=1234)
        arguments.add_common(parser, heads="16", time_limit=120.0)
        add("--seq-lens", type=parse_sizes, default="4k", help="tokens of the sequence")
        add("--ffn-hidden-size", type=arguments.count, default=2048, help="width of the MLP")
        add("--rounds", type=arguments.count, default=3, help="measurements of each layer")
        add("--steps", type=arguments.count, default=40, help="steps of a measurement")
        arguments.add_dims(parser, DIMS)

    def environment(self) -> dict:
        """With what all layers have in common."""
        return provenance.describe(
            self.processes.on_gpu,
            self.processes.dtype,
            dims=dims_of(self.args),
            ffn_hidden_size=self.args.ffn_hidden_size,
            layers=self.layers,
        )

    def cases(self) -> list[Case]:
        """Those of one size and recomputation behind each other."""
        found = [
            Case(implementation, heads, tokens, recomputed, graphs)
            for heads in self.args.heads
            for tokens in sorted(self.args.seq_lens)
            for recomputed in (True, False)
            for graphs in (False, True)
            for implementation in IMPLEMENTATIONS
        ]
        return arguments.chosen(found, self.args.only)

    def measure(self, case: Case) -> Row:
        """Measure ours and Megatron's with the first of them.

        Raises:
            Refused: With the reason of a case that could not be measured.
        """
        if case not in self._rows:
            works = (replace(case, implementation=name) for name in IMPLEMENTATIONS)
            wanted = self.cases()
            self._rows |= self._in_turns([one for one in works if one in wanted])
        row = self._rows[case]
        if row.error:
            raise Refused(row.error)
        return row

    def _in_turns(self, cases: list[Case]) -> dict[Case, Row]:
        from benchmarks.kit.report import reason

        seconds: dict[Case, list[tuple[float, float]]] = {case: [] for case in cases}
        errors: dict[Case, str] = {}
        for _ in range(self.args.rounds):
            for case in cases:
                if case in errors:
                    continue
                try:
                    seconds[case].append(self._round(case))
                except Exception as problem:  # the others are measured all the same
                    errors[case] = reason(problem)
        return {
            case: Row(case=case, error=errors[case])
            if case in errors
            else Row(case=case, times=Times.of(steps), host=Times.of(host))
            for case, found in seconds.items()
            for steps, host in (zip(*found) if found else ((), ()),)
        }

    def _round(self, case: Case) -> tuple[float, float]:
        """Seconds of a step, and until the host has queued one."""
        if case.graphs and not self.processes.on_gpu:
            raise Refused("it needs a GPU")
        from megatron.core.transformer import cuda_graphs

        with self.processes.own_stream():
            try:
                return self._times(self._warmed(case))
            finally:
                if case.graphs:
                    cuda_graphs.delete_cuda_graphs()
                gc.collect()

    def _warmed(self, case: Case) -> Callable[[], None]:
        """A step that has been captured, or repeated often enough."""
        from megatron.core.transformer import cuda_graphs

        step = self._step(case)
        for _ in range(_WARM_UP):
            step()
            if case.graphs:
                cuda_graphs.create_cudagraphs()
        return step

    def _times(self, step: Callable[[], None]) -> tuple[float, float]:
        count = self.args.steps
        self.processes.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            step()
        self.processes.synchronize()
        whole = (time.perf_counter() - begin) / count
        # Few: the queue of a GPU holds about a thousand launches, then the host waits.
        few = min(count, 3)
        begin = time.perf_counter()
        for _ in range(few):
            step()
        host = (time.perf_counter() - begin) / few
        self.processes.synchronize()
        return whole, host

    def _step(self, case: Case) -> Callable[[], None]:
        """Forward and backward of a new layer."""
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.transformer.spec_utils import build_module

        config = self._config(case)
        layer = build_module(self._spec(case, config), config=config, layer_number=1)
        layer = layer.to(self.processes.device)
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        with self.processes.own_stream(new=True):
            wrapped = DistributedDataParallel(config, ddp, layer).train()
        shape = case.tokens, 1, self.args.hidden_size
        x, grad = self.processes.random(*shape).requires_grad_(), self.processes.random(*shape)

        def step() -> None:
            x.grad = None
            output = wrapped(hidden_states=x, attention_mask=None)
            (output[0] if isinstance(output, tuple) else output).backward(grad)

        return step

    def _spec(self, case: Case, config: Any) -> Any:
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_with_transformer_engine_spec,
        )

        from specs.absorbed_mla_layer_specs import get_absorbed_mla_layer_spec

        if case.implementation == "ours":
            return get_absorbed_mla_layer_spec(config, backend=self.layers)
        if self.layers == "local":
            raise Refused("Megatron's MLA needs TransformerEngine's attention")
        return get_gpt_layer_with_transformer_engine_spec(
            multi_latent_attention=True, qk_layernorm=True
        )

    def _config(self, case: Case) -> Any:
        from benchmarks.kit.layers import mla_config

        recomputed = {
            "recompute_granularity": "selective",
            "recompute_modules": ["mla_up_proj"],
        }
        return mla_config(
            self.args,
            self.processes,
            self.processes.dtype,
            num_layers=1,
            ffn_hidden_size=self.args.ffn_hidden_size,
            num_attention_heads=case.heads,
            gated_linear_unit=True,
            cuda_graph_impl="local" if case.graphs else "none",
            **(recomputed if case.recomputed else {}),
        )


if __name__ == "__main__":
    leave(GraphsBenchmark.main())
