"""Run the layer on random weights and input, and compare it with the oracle."""

import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests import oracle
from tests.oracle import OracleMLA, Table
from tests.support.cases import random_weights
from tests.support.error_table import ErrorTable
from tests.support.harness import (
    Setup,
    build_attention,
    load_weights,
    module_table,
    named_tensors,
    run,
    worst_over_ranks,
)
from tests.support.layouts import Layout
from tests.support.numerics import Deviation, bounds_from_eager, compare

# In float64, with the same rotary table.
SAME_TABLE_BOUND = 1e-9
# The module's table is float32: half an ulp of a cosine, 6e-8, on every rotary channel.
OWN_TABLE_BOUND = 1e-6


@dataclass(frozen=True)
class Execution:
    """Inputs and results of one forward and backward; ``rows`` are x and the output's gradient."""

    mla: OracleMLA
    setup: Setup
    tokens: Layout
    attention: nn.Module
    weights: dict[str, Tensor]
    rows: tuple[Tensor, Tensor]
    tensors: dict[str, Tensor]

    def table(self) -> Table | None:
        """The module's own rotary table."""
        return module_table(self.attention, self.mla, self.tokens)

    def oracle(self, table: Table | None, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """The oracle's output and gradients by name; None for its own rotary table."""
        # Executions of one shape and layout have the same expected result, whatever the setup.
        key = (self.mla, self.setup.dtype, dtype)
        known = self.tokens.truths.setdefault(key, [])
        for other, result in known:
            if same_table(other, table):
                return result
        found = oracle.evaluate(
            self.mla, self.weights, *self.rows, self.tokens.sequences, table, dtype
        )
        known.append((table, named_tensors(self.mla, found)))
        return known[-1][1]

    def bounds(self, table: Table | None) -> float | dict[str, float]:
        """Largest accepted relative errors at this precision; see ``numerics``."""
        dtype = self.setup.dtype
        if dtype == torch.float64:
            return SAME_TABLE_BOUND
        # TransformerEngine multiplies float32 matrices in TF32, which has float16's significand,
        # unless this switch of the CUDA libraries forbids it.
        tf32 = self.setup.backend == "transformer_engine" and dtype == torch.float32
        if tf32 and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
            dtype = torch.float16
        return bounds_from_eager(self.oracle(table, dtype), self.oracle(table), dtype)

    def check(
        self, error_table: ErrorTable | None = None, shape: str = "", layout: str = ""
    ) -> None:
        """Compare the tensors with the oracle on all ranks, and record the worst error."""
        table = self.table()
        deviation = compare(self.tensors, self.trained(self.oracle(table)), self.bounds(table))
        self.report(deviation, "module's float32", error_table, shape, layout)

    def check_own_table(self, error_table: ErrorTable, shape: str, layout: str) -> None:
        """Compare with the oracle and its own float64 rotary table."""
        deviation = compare(self.tensors, self.trained(self.oracle(None)), OWN_TABLE_BOUND)
        self.report(deviation, "oracle's float64", error_table, shape, layout)

    def trained(self, truth: dict[str, Tensor]) -> dict[str, Tensor]:
        """Without the gradients of what is frozen beside LoRA."""
        return {n: t for n, t in truth.items() if n in self.tensors} if self.mla.lora else truth

    def report(self, deviation: Deviation, table: str, error_table, shape, layout) -> None:
        """Record a deviation, and fail on all ranks if it is out of bounds on one."""
        deviation = worst_over_ranks(deviation)
        if error_table is not None:
            row = {"shape": shape, "layout": layout, **self.setup.describe()}
            error_table.add({**row, "rotary_table": table}, deviation)
        deviation.check(f"({self.setup.dtype}, {table} rotary table)")


def same_table(one: Table | None, other: Table | None) -> bool:
    """Whether two rotary tables are equal, or both missing."""
    if one is None or other is None:
        return one is other
    return all(map(torch.equal, one, other))


def execute(mla: OracleMLA, setup: Setup, tokens: Layout, load=load_weights, **call) -> Execution:
    """Run the layer forward and backward; ``call`` goes on to ``harness.run``."""
    # Rounded first, so that the layer and the oracle get the same numbers.
    weights = {n: w.to(setup.dtype).double() for n, w in random_weights(mla).items()}
    x, output_grad = (
        tokens.random_rows(mla.hidden, seed).to(setup.dtype).double() for seed in (1, 2)
    )
    attention = build_attention(mla, setup)
    load(attention, mla, setup, weights)
    result = run(attention, mla, setup, tokens, x, output_grad, **call)
    rows = (x.flatten(0, 1), output_grad.flatten(0, 1))
    return Execution(mla, setup, tokens, attention, weights, rows, named_tensors(mla, result))
