"""One execution of the layer on random weights and input, and the oracle on the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests import oracle
from tests.oracle import OracleMLA, Table
from tests.support.cases import random_weights
from tests.support.harness import (
    Setup,
    build_attention,
    load_weights,
    module_table,
    named_tensors,
    run,
)
from tests.support.layouts import Layout


@dataclass(frozen=True)
class Execution:
    """What the layer made, and what it was given.

    Attributes:
        mla: Shape of the layer.
        tokens: Layout of the input.
        attention: The layer.
        weights: Its whole weights, float64.
        rows: Input and output gradient, float64 [rows, hidden].
        tensors: Whole output and gradients by name.
    """

    mla: OracleMLA
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
        result = oracle.evaluate(
            self.mla, self.weights, *self.rows, self.tokens.sequences, table, dtype
        )
        return named_tensors(self.mla, result)


def execute(mla: OracleMLA, setup: Setup, tokens: Layout, **call) -> Execution:
    """Run the layer forward and backward; ``call`` goes on to ``harness.run``."""
    # Rounded once, so that every evaluation starts from the same numbers.
    weights = {n: w.to(setup.dtype).double() for n, w in random_weights(mla).items()}
    x, output_grad = (
        tokens.random_rows(mla.hidden, seed).to(setup.dtype).double() for seed in (1, 2)
    )
    attention = build_attention(mla, setup)
    load_weights(attention, mla, setup, weights)
    result = run(attention, mla, setup, tokens, x, output_grad, **call)
    rows = (x.flatten(0, 1), output_grad.flatten(0, 1))
    return Execution(mla, tokens, attention, weights, rows, named_tensors(mla, result))
