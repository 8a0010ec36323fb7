#!/usr/bin/env python3
"""Measure what standard MLA fuses, RoPE and the down-projections of query and K/V, beside ours.

    $ python scripts/benchmarks/fusions.py --json docs/measurements/attention/fusions.json
    $ python scripts/benchmarks/fusions.py --cases query,keys --heads 128 --block-heads 4,8,16,32,64

Megatron's options are apply_rope_fusion and mla_down_proj_fusion.

query   rotation of a query, in place: ours, Megatron's fused kernel, a copy of the same bytes
keys    latent and k_rope to keys and values and back: ours, and Megatron's up-projection with its
        fused kernel, which also copies keys and values apart; "rope alone" is without the products
down    hidden states to both down-projections as two products or one, of tensors and of layers
layer   our whole attention layer with separate and with fused down-projections

All works of a case are run in turns; figures are medians. Times are the GPU's, which is kept busy
while the host queues a turn; "host" is what the host takes to queue a step. "difference" compares
outputs with those of the first work. Megatron's kernels are tuned over --block-heads.

    12.3 s  query n=16 S=4096: ours 14.1 us, megatron's fused RoPE 15.2 us, copy 12.0 us
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit
from benchmarks.kit.works import Work, WorksBenchmark, WorksReport, WorksRow

KINDS = ("query", "keys", "down", "layer")
# That Megatron's tuner knows.
BLOCK_HEADS = ("1", "2", "4", "8", "16", "32", "64", "128")


@dataclass(frozen=True)
class FusionCase(kit.Case):
    """One task, done by several works."""

    text = "{kind}{heads:? n=%s} S={tokens}"
    kind: str  # one of KINDS
    heads: int  # 0 where there are none
    tokens: int


class FusionsBenchmark(WorksBenchmark):
    """Works of the same task in turns."""

    report = WorksReport.of(kit.row_of(FusionCase, WorksRow))
    options = kit.declare(
        "json render only device heads=16,128 seq_lens=4k,8k seconds_per_row=0.25 "
        "time_limit=60 seed=1234",
        cases=kit.some("what to measure", KINDS),
        block_heads=kit.some(
            "heads of one program of Megatron's kernels; its tuner compiles each, in seconds",
            BLOCK_HEADS,
            "8,32",
        ),
        dims=kit.DIMS,
    )
    quick = "--seq-lens 8"
    recorded = ("dims", "block_heads", "ceilings")

    def cases(self) -> list[FusionCase]:
        """By kind, small ones first."""
        args = self.args
        return [
            FusionCase(kind, heads, tokens)
            for kind in args.cases
            for heads in ([0] if kind == "down" else sorted(args.heads))
            for tokens in sorted(args.seq_lens)
        ]

    def works(self, case: FusionCase) -> list[Work]:
        """See above."""
        from benchmarks import fused_down, fused_rope

        args, processes = self.args, self.processes
        if case.kind == "down":
            return fused_down.down_works(case.tokens, args, processes)
        if case.kind == "layer":
            return fused_down.layer_works(case.heads, case.tokens, args, processes)
        inputs = fused_rope.Inputs(args, case.heads, case.tokens, processes)
        return {"query": fused_rope.query_works, "keys": fused_rope.key_works}[case.kind](inputs)


if __name__ == "__main__":
    kit.main(FusionsBenchmark)
