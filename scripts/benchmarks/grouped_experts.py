#!/usr/bin/env python3
"""Measure the parts of a layer of grouped experts, our kernels beside PyTorch's operators.

    $ python scripts/benchmarks/grouped_experts.py --json grouped-experts.json
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
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit
from benchmarks.kit.works import Work, WorksBenchmark, WorksReport, WorksRow
from console.parser import Parser

if TYPE_CHECKING:
    from torch import Tensor

torch: Any = kit.lazy("torch")
KINDS = ("choose", "order", "into", "activation", "out_of", "sums")
# Groups of experts and how many of them a token may choose from, where there are as many experts.
_GROUPS = (8, 4)


@dataclass(frozen=True)
class PartCase(kit.Case):
    """One part of a layer, for so many tokens."""

    text = "{kind} T={tokens}"
    kind: str
    tokens: int


@dataclass(frozen=True)
class Inputs:
    """Of all parts of a layer with T tokens that choose K of E experts."""

    logits: Tensor  # [T, E] fp32
    bias: Tensor  # [E] fp32
    chosen: Tensor  # int64 [T, K]
    rows: Tensor  # [T * K, H]
    gate_and_up: Tensor  # [T * K, 2 F]
    inner: Tensor  # [T * K, F]
    probs: Tensor  # [T * K] fp32


class ExpertsBenchmark(WorksBenchmark):
    """Works of the same part in turns."""

    report = WorksReport.of(kit.row_of(PartCase, WorksRow))
    options = kit.declare(
        "json render only device seconds_per_row=0.1 time_limit=60 seed=1234",
        cases=kit.some("what to measure", KINDS),
        tokens=kit.sizes("tokens of a step", "1,32,128,1k,8k"),
        experts=kit.number("routed experts", 16),
        topk=kit.number("experts of a token", 8),
        hidden_size=kit.number("width of the hidden states", 7168),
        moe_ffn_hidden_size=kit.number("channels of an expert", 2048),
    )
    quick = "--experts 8 --topk 4 --hidden-size 32 --moe-ffn-hidden-size 16 --tokens 3"
    recorded = ("experts", "topk", "hidden_size", "moe_ffn_hidden_size", "ceilings")

    def prepare(self) -> None:
        """The weights of all experts."""
        super().prepare()
        args, random = self.args, self.processes.random
        width, channels = args.hidden_size, args.moe_ffn_hidden_size
        self._weights = {
            "into": random(args.experts, 2 * channels, width) * width**-0.5,
            "out_of": random(args.experts, width, channels) * channels**-0.5,
        }

    @classmethod
    def check(cls, parser: Parser, args: argparse.Namespace) -> None:
        """A token chooses different experts."""
        if args.topk > args.experts:
            parser.error(f"--topk must be at most --experts={args.experts}, got {args.topk}")

    def cases(self) -> list[PartCase]:
        """By kind, few tokens first."""
        return [PartCase(kind, n) for kind in self.args.cases for n in sorted(self.args.tokens)]

    def works(self, case: PartCase) -> list[Work]:
        """By the functions of the kind, whose results are compared as they are or by another."""
        calls = getattr(self, f"_{case.kind}")(self._inputs(case.tokens))
        return [self._work(case, name, *call) for name, call in calls.items()]

    def _work(
        self, case: PartCase, name: str, call: Callable, outputs: Callable = lambda found: [found]
    ) -> Work:
        from absorbed_mla.kernels.triton.common import interpreted

        if name != "torch" and not self.processes.on_gpu and not interpreted():
            return Work(name=name, error="it needs a GPU")
        weights, traffic = self._weights.get(case.kind), None
        if weights is not None:
            chosen = min(case.tokens * self.args.topk, self.args.experts)
            traffic = weights[:chosen].numel() * weights.element_size(), 0
        return Work(call, outputs=outputs, traffic=traffic, name=name)

    def _inputs(self, tokens: int) -> Inputs:
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
        return self._products(inputs, inputs.rows, self._weights["into"])

    def _out_of(self, inputs: Inputs) -> dict[str, tuple]:
        return self._products(inputs, inputs.inner, self._weights["out_of"])

    def _products(self, inputs: Inputs, x: Tensor, weights: Tensor) -> dict[str, tuple]:
        from absorbed_mla.serving.experts.product import of_many_rows

        ends = self._rows(inputs).ends

        def ours() -> Tensor:
            from absorbed_mla.kernels.moe.skinny_gemm import few_rows_product

            return few_rows_product(x, weights, ends)

        def parity() -> Tensor:
            from absorbed_mla.kernels.invariant.grouped_product import grouped_product

            return grouped_product(x, weights, ends)

        torchs = (lambda: of_many_rows(x, weights, ends),)
        return {"torch": torchs, "ours": (ours,), "parity": (parity,)}

    def _activation(self, inputs: Inputs) -> dict[str, tuple]:
        x, probs, rows = inputs.gate_and_up, inputs.probs, self._rows(inputs)

        def torchs() -> Tensor:
            gate, up = x.chunk(2, -1)
            weights = rows.choices_of(probs).unsqueeze(-1)
            return torch.nn.functional.silu(gate).mul_(up).mul_(weights)

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


if __name__ == "__main__":
    kit.main(ExpertsBenchmark)
