"""Gradients after ``load_state_dict(assign=True)``, which puts other parameters in place."""

from __future__ import annotations

import pytest
import torch

from tests import oracle
from tests.distributed.test_oracle_grid import down_projection, sequence_parallel
from tests.support import world
from tests.support.cases import TINY, random_weights
from tests.support.execution import SAME_TABLE_BOUND
from tests.support.harness import (
    Setup,
    build_attention,
    load_weights,
    module_table,
    named_tensors,
    run,
    worst_over_ranks,
)
from tests.support.layouts import grid_layout
from tests.support.numerics import compare
from tests.support.standard import standard_state_dict


@sequence_parallel
@down_projection
@pytest.mark.parametrize("layout", ["standard", "own"])
def test_gradients(sequence_parallel, down_projection, layout):
    """They are reduced by marks on the parameters, which torch does not copy."""
    setup = Setup(sequence_parallel=sequence_parallel, down_projection=down_projection)
    weights = random_weights(TINY)
    attention = build_attention(TINY, setup)
    if layout == "standard":
        state = standard_state_dict(TINY, setup, weights)
        state = {name: weight.to(world.device()) for name, weight in state.items()}
    else:
        load_weights(attention, TINY, setup, weights)
        state = {k: v.clone() for k, v in attention.state_dict().items() if v is not None}
    before = dict(attention.named_parameters())
    attention.load_state_dict(state, assign=True)
    assert all(before[name] is not new for name, new in attention.named_parameters())
    tokens = grid_layout("sbhd", divisible=True)
    x, output_grad = (tokens.random_rows(TINY.hidden, seed) for seed in (1, 2))
    found = named_tensors(TINY, run(attention, TINY, setup, tokens, x, output_grad))
    rows = (x.flatten(0, 1), output_grad.flatten(0, 1))
    table = module_table(attention, TINY, tokens)
    truth = oracle.evaluate(TINY, weights, *rows, tokens.sequences, table, torch.float64)
    expected = named_tensors(TINY, truth)
    worst_over_ranks(compare(found, expected, SAME_TABLE_BOUND)).check()
