#!/usr/bin/env python3
"""Measure the parts of a layer of grouped experts, our kernels beside PyTorch's operators.

    $ python scripts/benchmarks/grouped_experts.py --json docs/generation/grouped-experts.json
    $ python scripts/benchmarks/grouped_experts.py --cases into,out_of --tokens 1,32,128

choose      experts of every token, by Megatron's function and in one launch
order       choices sorted by expert, by PyTorch's sort and in one launch
into        rows of every expert to gate and up, by PyTorch's grouped product and ours for few rows
activation  gate and up to what the second product takes
out_of      back to the width of the hidden states, as "into"
sums        of the rows of each token

Widths are DeepSeek-V3's, with the 16 experts of scripts/benchmarks/serving.py. All works of a case
run in turns; figures are medians. Times are the GPU's, which is kept busy while the host queues a
turn; "host" is what the host takes to queue one. "difference" compares with PyTorch's result, and
TB/s count the weights of the chosen experts. "parity" is the product of parity mode. A CPU has
PyTorch's only.

    12.3 s  into T=32: torch 362.1 us, ours 315.4 us

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.fusions import FusionsReport
from benchmarks.fusions import Row as FusionsRow
from benchmarks.kit import arguments, provenance
from benchmarks.kit.arguments import count, list_of, one_of, parse_sizes
from benchmarks.kit.run import Benchmark
from benchmarks.together import Work, measure_together
from console.parser import Parser
from console.script import leave

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("choose", "order", "into", "activation", "out_of", "sums")
# Groups of experts and how many of them a token may choose from, where there are as many experts.
_GROUPS = (8, 4)


@dataclass(frozen=True)
class Case:
    """One part of a layer, for so many tokens."""

    kind: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.kind} T={self.tokens}"


@dataclass(frozen=True, kw_only=True)
class Row(FusionsRow):
    """One part, by PyTorch and by us."""

    case: Case


class ExpertsReport(FusionsReport):
    """One run."""

    row = Row


@dataclass(frozen=True)
class Inputs:
    """Of all parts of a layer with T tokens that choose K of E experts.

    Attributes:
        logits: [T, E] fp32.
        bias: [E] fp32.
        chosen: Int64 [T, K].
        rows: [T * K, H].
        gate_and_up: [T * K, 2 F].
        inner: [T * K, F].
        probs: [T * K] fp32.
    """

    logits: Tensor
    bias: Tensor
    chosen: Tensor
    rows: Tensor
    gate_and_up: Tensor
    inner: Tensor
    probs: Tensor


class ExpertsBenchmark(Benchmark):
    """Works of the same part in turns."""

    script = "grouped_experts.py"
    report = ExpertsReport

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        arguments.use_device(args.device)
        from benchmarks.kit.processes import Processes

        self.processes = Processes(args.seed)
        random, width, channels = self.processes.random, args.hidden_size, args.moe_ffn_hidden_size
        self._weights_into = random(args.experts, 2 * channels, width) * width**-0.5
        self._weights_out_of = random(args.experts, width, channels) * channels**-0.5

    @classmethod
    def add_options(cls, parser: Parser) -> None:
        """See --help."""
        add = parser.add_argument
        arguments.add_common(parser, render=None, json=None, only=None, device=None, seed=1234)
        arguments.add_common(parser, seconds_per_row=0.1, time_limit=60.0)
        add("--cases", type=list_of(one_of(KINDS)), default=",".join(KINDS), help="what to measure")
        add("--tokens", type=parse_sizes, default="1,32,128,1k,8k", help="tokens of a step")
        add("--experts", type=count, default=16, help="routed experts")
        add("--topk", type=count, default=8, help="experts of a token")
        add("--hidden-size", type=count, default=7168, help="width of the hidden states")
        add("--moe-ffn-hidden-size", type=count, default=2048, help="channels of an expert")

    @classmethod
    def check(cls, parser: Parser, args: argparse.Namespace) -> None:
        """A token chooses different experts."""
        if args.topk > args.experts:
            parser.error(f"--topk must be at most --experts={args.experts}, got {args.topk}")

    def environment(self) -> dict:
        """With the rates that the device reaches."""
        from benchmarks.kit.timing import ceilings

        args, on_gpu = self.args, self.processes.on_gpu
        sizes = {name: getattr(args, name) for name in ("experts", "topk", "hidden_size")}
        sizes["moe_ffn_hidden_size"] = args.moe_ffn_hidden_size
        rates = ceilings(on_gpu)
        return provenance.describe(on_gpu, self.processes.dtype, **sizes, ceilings=rates)

    def cases(self) -> list[Case]:
        """By kind, few tokens first."""
        found = [Case(kind, n) for kind in self.args.cases for n in sorted(self.args.tokens)]
        return arguments.chosen(found, self.args.only)

    def measure(self, case: Case) -> Row:
        """The works of a case."""
        calls = getattr(self, f"_{case.kind}")(self._inputs(case.tokens))
        works = [self._work(case, name, *call) for name, call in calls.items()]
        found = measure_together(works, self.processes, self.args.seconds_per_row)
        return Row(case=case, works=found)

    def _work(self, case: Case, name: str, call: Callable, outputs: Callable | None = None) -> Work:
        if name != "torch" and not self.processes.on_gpu and not _is_interpreted():
            return Work(name, error="it needs a GPU")
        weights = {"into": self._weights_into, "out_of": self._weights_out_of}.get(case.kind)
        read = 0
        if weights is not None:
            chosen = min(case.tokens * self.args.topk, self.args.experts)
            read = weights[:chosen].numel() * weights.element_size()
        traffic = (read, 0) if read else None
        return Work(name, call, outputs=outputs or (lambda found: [found]), traffic=traffic)

    def _inputs(self, tokens: int) -> Inputs:
        import torch

        args, random = self.args, self.processes.random
        rows, width, channels = tokens * args.topk, args.hidden_size, args.moe_ffn_hidden_size
        logits = random(tokens, args.experts).float()
        return Inputs(
            logits,
            random(args.experts).float() / 8,
            torch.topk(logits, args.topk).indices,
            random(rows, width),
            random(rows, 2 * channels),
            random(rows, channels),
            random(rows).float().abs(),
        )

    def _rows(self, inputs: Inputs):
        from absorbed_mla.serving.experts.permuted_tokens import PermutedTokens

        return PermutedTokens.of(inputs.chosen, self.args.experts)

    def _choose(self, inputs: Inputs) -> dict[str, tuple]:
        import torch
        from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

        logits, topk, bias = inputs.logits, self.args.topk, inputs.bias
        groups, most = _GROUPS
        fits = not self.args.experts % groups and not topk % most
        limits = {"group_topk": most if fits else None}

        def ours() -> tuple[Tensor, Tensor]:
            from absorbed_mla.kernels.moe.choice import choose_experts

            found = groups if fits else None
            return choose_experts(
                logits, topk, softmax=False, bias=bias, groups=found, scale=2.5, **limits
            )

        def megatron() -> tuple[Tensor, Tensor]:
            return topk_routing_with_score_function(
                logits,
                topk,
                num_groups=groups if fits else None,
                scaling_factor=2.5,
                score_function="sigmoid",
                expert_bias=bias,
                dense_output=True,
                **limits,
            )

        def by_expert(found: tuple[Tensor, Tensor]) -> list[Tensor]:
            return [torch.zeros_like(logits).scatter_(1, found[1], found[0])]

        return {"torch": (megatron, by_expert), "ours": (ours, by_expert)}

    def _order(self, inputs: Inputs) -> dict[str, tuple]:
        from absorbed_mla.serving.experts.permuted_tokens import PermutedTokens

        chosen, experts = inputs.chosen, self.args.experts

        def ours() -> PermutedTokens:
            from absorbed_mla.kernels.moe.order import order_by_expert

            return PermutedTokens(*order_by_expert(chosen, experts, 0))

        def places(found: PermutedTokens) -> list[Tensor]:
            return [found.places.double(), found.ends.double()]

        sort = PermutedTokens.by_sorting
        return {"torch": (lambda: sort(chosen, experts), places), "ours": (ours, places)}

    def _into(self, inputs: Inputs) -> dict[str, tuple]:
        return self._products(inputs, inputs.rows, self._weights_into)

    def _out_of(self, inputs: Inputs) -> dict[str, tuple]:
        return self._products(inputs, inputs.inner, self._weights_out_of)

    def _products(self, inputs: Inputs, x: Tensor, weights: Tensor) -> dict[str, tuple]:
        from absorbed_mla.serving.experts.product import of_many_rows

        ends = self._rows(inputs).ends

        def ours() -> Tensor:
            from absorbed_mla.kernels.moe.skinny_gemm import few_rows_product

            return few_rows_product(x, weights, ends)

        def parity() -> Tensor:
            from absorbed_mla.kernels.invariant.grouped_product import grouped_product

            return grouped_product(x, weights, ends)

        def torchs() -> Tensor:
            return of_many_rows(x, weights, ends)

        return {"torch": (torchs,), "ours": (ours,), "parity": (parity,)}

    def _activation(self, inputs: Inputs) -> dict[str, tuple]:
        import torch.nn.functional as F

        x, probs, rows = inputs.gate_and_up, inputs.probs, self._rows(inputs)

        def torchs() -> Tensor:
            gate, up = x.chunk(2, -1)
            return F.silu(gate).mul_(up).mul_(rows.choices_of(probs).unsqueeze(-1))

        def ours() -> Tensor:
            from absorbed_mla.kernels.moe.swiglu import swiglu

            return swiglu(x, probs, rows.choices, rows.ends)

        return {"torch": (torchs,), "ours": (ours,)}

    def _sums(self, inputs: Inputs) -> dict[str, tuple]:
        rows, x = self._rows(inputs), inputs.rows

        def torchs() -> Tensor:
            return x.index_select(0, rows.places.flatten()).unflatten(0, rows.places.shape).sum(1)

        def ours() -> Tensor:
            from absorbed_mla.kernels.moe.sums import summed

            return summed(x, rows.places, rows.ends)

        return {"torch": (torchs,), "ours": (ours,)}


def _is_interpreted() -> bool:
    """Whether Triton's interpreter runs kernels, also on a CPU."""
    from absorbed_mla.kernels.triton.common import interpreted

    return interpreted()


if __name__ == "__main__":
    leave(ExpertsBenchmark.main())
