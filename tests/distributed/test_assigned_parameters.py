"""Gradients after ``load_state_dict(assign=True)``, which puts other parameters in place."""

from __future__ import annotations

import pytest

from tests.distributed.test_oracle_grid import down_projection, sequence_parallel
from tests.support import world
from tests.support.cases import TINY
from tests.support.execution import execute
from tests.support.harness import Setup, load_weights
from tests.support.layouts import grid_layout
from tests.support.standard import standard_state_dict


@sequence_parallel
@down_projection
@pytest.mark.parametrize("layout", ["standard", "own"])
def test_gradients(sequence_parallel, down_projection, layout):
    """They are reduced by marks on the parameters, which torch does not copy."""

    def assign(attention, mla, setup, weights) -> None:
        if layout == "standard":
            state = standard_state_dict(mla, setup, weights)
        else:
            load_weights(attention, mla, setup, weights)
            state = {k: v.clone() for k, v in attention.state_dict().items() if v is not None}
        before = dict(attention.named_parameters())
        state = {name: weight.to(world.device()) for name, weight in state.items()}
        attention.load_state_dict(state, assign=True)
        assert all(before[name] is not new for name, new in attention.named_parameters())

    setup = Setup(sequence_parallel=sequence_parallel, down_projection=down_projection)
    execute(TINY, setup, grid_layout("sbhd", divisible=True), assign).check()
