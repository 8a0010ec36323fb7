"""Standard MLA state dicts load into every rank as they are, without a conversion step.

The combined linear_kv_up_proj is put together here, head by head, so a wrong row order in the
package shows even where it undoes itself on the way back.
"""

import pytest
import torch

from absorbed_mla import to_standard_state_dict
from tests.distributed.test_oracle_grid import down_projection, sequence_parallel
from tests.support import world
from tests.support.cases import TINY, random_weights, shapes
from tests.support.execution import execute
from tests.support.harness import (
    Setup,
    build_attention,
    load_weights,
    parameters_by_oracle_name,
    rank_weights,
)
from tests.support.layouts import grid_layout
from tests.support.standard import FUSED, standard_state_dict

SHAPES = {"tiny": TINY, **{n: shapes(1)[n] for n in ("q_lora_none", "no_latent_norm", "no_rope")}}


def loaded(mla, setup, state_dict):
    """Parameters by oracle name after loading, strictly."""
    attention = build_attention(mla, setup)
    attention.load_state_dict(state_dict)
    return parameters_by_oracle_name(attention, mla)


def assert_exact(actual, expected):
    """Loading only moves data."""
    assert set(actual) == set(expected)
    for name, weight in expected.items():
        assert torch.equal(actual[name].detach().cpu(), weight), name


@down_projection
@pytest.mark.parametrize("shape", SHAPES)
def test_combined_kv_up_projection(shape, down_projection):
    """Mixed up rows would give every head another's values, or keys for values."""
    mla, setup = SHAPES[shape], Setup(down_projection=down_projection)
    weights = random_weights(mla)
    parameters = loaded(mla, setup, standard_state_dict(mla, setup, weights))
    assert_exact(parameters, rank_weights(setup, weights))


@down_projection
def test_norms_fused_by_transformer_engine(down_projection):
    """TransformerEngine keeps a norm's weight in the linear layer behind it, with extra state."""
    setup, weights = Setup(down_projection=down_projection), random_weights(TINY)
    state = standard_state_dict(TINY, setup, weights)
    state = {FUSED.get(name, name): t for name, t in state.items()}
    state["linear_q_up_proj._extra_state"] = torch.empty(0, dtype=torch.uint8)
    state["linear_kv_up_proj._extra_state"] = torch.empty(0, dtype=torch.uint8)
    assert_exact(loaded(TINY, setup, state), rank_weights(setup, weights))


@down_projection
def test_fused_down_projection(down_projection):
    """This rank's rows of the query's down-projection, then of the keys and values'."""
    setup, weights = Setup(down_projection=down_projection), random_weights(TINY)
    state = standard_state_dict(TINY, setup, weights)
    fused = [state.pop(f"linear_{name}_down_proj.weight") for name in ("q", "kv")]
    state["linear_qkv_down_proj.weight"] = torch.cat(fused)
    assert_exact(loaded(TINY, setup, state), rank_weights(setup, weights))


def test_own_state_dict_comes_back_as_a_standard_one():
    """What to_standard_state_dict writes is what Megatron's module would have written."""
    setup, weights = Setup(), random_weights(TINY)
    attention = build_attention(TINY, setup)
    standard = standard_state_dict(TINY, setup, weights)
    attention.load_state_dict(standard)
    written = to_standard_state_dict(attention.state_dict(), attention.dims)
    written = {n: t for n, t in written.items() if not n.endswith("_extra_state")}
    assert_exact(written, standard)


@sequence_parallel
@down_projection
@pytest.mark.parametrize("layout", ["standard", "own"])
def test_gradients_of_assigned_parameters(sequence_parallel, down_projection, layout):
    """They are reduced by marks, which torch does not copy with ``assign=True``."""

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
