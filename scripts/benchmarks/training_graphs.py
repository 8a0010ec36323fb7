#!/usr/bin/env python3
"""Measure training steps of a transformer layer in Megatron's CUDA graphs, ours beside Megatron's.

    $ python scripts/benchmarks/training_graphs.py --json docs/measurements/attention/graphs.json

A layer with attention and a MLP of --ffn-hidden-size, in Megatron's DDP: forward and backward of a
sequence, without optimizer. Layers are of TransformerEngine where it is installed, and Megatron's
``local`` ones otherwise. "graphs" is ``cuda_graph_impl="local"``; on a CPU there are none.

step  wall time of a step, of --steps that are queued one behind the other
host  until the host had queued one

Ours and Megatron's are measured --rounds times in turns. Output:

    14.2 s  ours, graphs, recomputed n=16 S=4096: step 5.16 ms, host 0.75 ms
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit

IMPLEMENTATIONS = ("ours", "megatron")
# Megatron captures behind the first step; a second one sees that the replay is complete.
_WARM_UP = 3


@dataclass(frozen=True)
class GraphCase(kit.Case):
    """One layer."""

    text = "{implementation}{graphs:?, graphs}{recomputed:?, recomputed} n={heads} S={tokens}"
    implementation: str  # "ours" or "megatron"
    heads: int  # of the attention
    tokens: int  # of the sequence
    recomputed: bool  # whether mla_up_proj is
    graphs: bool  # whether steps are in CUDA graphs


@dataclass(frozen=True, kw_only=True)
class Row(kit.Row):
    """Times of a step in every round, and until the host had queued one."""

    case: GraphCase
    times: kit.Times | None = None
    host: kit.Times | None = None


class GraphsReport(kit.Report):
    """One run."""

    row = Row

    def figures(self, row: Row) -> dict[str, float]:
        """Milliseconds."""
        assert row.times is not None and row.host is not None
        return {"step_ms": 1e3 * row.times.median, "host_ms": 1e3 * row.host.median}


class GraphsBenchmark(kit.InTurns):
    """Layers in turns, each built anew in every round."""

    report = GraphsReport
    options = kit.declare(
        "json render only device heads=16 seq_lens=4k time_limit=120 seed=1234",
        ffn_hidden_size=kit.number("width of the MLP", 2048),
        rounds=kit.number("measurements of each layer", 3),
        steps=kit.number("steps of a measurement", 40),
        dims=kit.DIMS,
    )
    quick = "--seq-lens 8 --rounds 2 --steps 2"
    recorded = ("dims", "ffn_hidden_size")

    def prepare(self) -> None:
        """The processes, with random numbers that graphs can take."""
        from megatron.core import tensor_parallel
        from megatron.core.extensions.transformer_engine import HAVE_TE

        super().prepare()
        self.layers = "transformer_engine" if HAVE_TE and self.processes.on_gpu else "local"
        tensor_parallel.model_parallel_cuda_manual_seed(
            self.args.seed,
            te_rng_tracker=self.layers == "transformer_engine",
            use_cudagraphable_rng=self.processes.on_gpu,
            force_reset_rng=True,
        )

    def about(self) -> dict:
        """With the kind of layers."""
        return super().about() | {"layers": self.layers}

    def cases(self) -> list[GraphCase]:
        """Those of one size and recomputation behind each other."""
        args = self.args
        return [
            GraphCase(implementation, heads, tokens, recomputed, graphs)
            for heads in args.heads
            for tokens in sorted(args.seq_lens)
            for recomputed in (True, False)
            for graphs in (False, True)
            for implementation in IMPLEMENTATIONS
        ]

    def measure_input(self, cases: Sequence[GraphCase]) -> None:
        """Ours and Megatron's in every round."""
        seconds: dict[GraphCase, list[tuple[float, float]]] = {case: [] for case in cases}
        for _ in range(self.args.rounds):
            for case in (case for case in cases if case not in self.found):
                try:
                    seconds[case].append(self._round(case))
                except Exception as problem:  # the others are measured all the same
                    self.found[case] = self.failed(case, kit.reason(problem))
        for case in (case for case in cases if case not in self.found):
            steps, host = map(kit.Times.of, zip(*seconds[case]))
            self.found[case] = Row(case=case, times=steps, host=host)

    def _round(self, case: GraphCase) -> tuple[float, float]:
        """Seconds of a step, and until the host has queued one."""
        if case.graphs and not self.processes.on_gpu:
            raise kit.Refused("it needs a GPU")
        from megatron.core.transformer import cuda_graphs

        with self.processes.own_stream():
            try:
                return self._times(self._warmed(case))
            finally:
                if case.graphs:
                    cuda_graphs.delete_cuda_graphs()
                gc.collect()

    def _warmed(self, case: GraphCase) -> Callable[[], None]:
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

    def _step(self, case: GraphCase) -> Callable[[], None]:
        """Forward and backward of a new layer."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
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

    def _spec(self, case: GraphCase, config: Any) -> Any:
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_with_transformer_engine_spec,
        )

        from specs.absorbed_mla_layer_specs import get_absorbed_mla_layer_spec

        if case.implementation == "ours":
            return get_absorbed_mla_layer_spec(config, backend=self.layers)
        if self.layers == "local":
            raise kit.Refused("Megatron's MLA needs TransformerEngine's attention")
        return get_gpt_layer_with_transformer_engine_spec(
            multi_latent_attention=True, qk_layernorm=True
        )

    def _config(self, case: GraphCase) -> Any:
        from benchmarks.kit.layers import mla_config

        recomputed = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
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
    kit.main(GraphsBenchmark)
