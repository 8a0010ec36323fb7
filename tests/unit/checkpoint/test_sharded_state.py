"""Where the rows of W_UK and W_UV go in the standard's combined weight, without any process.

Ranks are made up, so that every tensor-parallel size is checked in milliseconds.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.transformer.attention import Attention
from torch import Tensor

from absorbed_mla import MLADims
from absorbed_mla.checkpoint import sharded
from tests.oracle import OracleMLA
from tests.support.cases import TINY, config_for, random_weights
from tests.support.harness import Setup, build_attention
from tests.support.refusal import refusal
from tests.support.standard import KV_UP, interleave_heads

PREFIX = "decoder.layers.3.self_attention."
SHAPES = {
    "tiny": TINY,
    "equal_widths": replace(TINY, nope=16, v=16),
    "no_common_divisor": replace(TINY, nope=7, v=5),
    "v_divides_nope": replace(TINY, nope=24, v=8),
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES)
EVERY_SIZE = pytest.mark.parametrize("size", [1, 2, 4])


def factories(mla: OracleMLA, rank: int, size: int, offsets: tuple = ()) -> list:
    """The two entries of one made-up rank."""
    dims = MLADims.from_config(config_for(mla), size)
    weights = random_weights(mla)
    rows = [(0, dims.qk_nope_head_dim), (dims.qk_nope_head_dim, dims.v_head_dim)]
    made = []
    for name, (first_row, head_dim) in zip(("w_uk", "w_uv"), rows):
        entry = SimpleNamespace(data=weights[name].chunk(size)[rank], replica_id=(0, rank, 0))
        key = PREFIX + KV_UP
        made.append(
            sharded._kv_up_factory(
                entry, key, first_row, head_dim, offsets, dims=dims, tp_rank=rank
            )
        )
    return made


@EVERY_SIZE
@EVERY_SHAPE
def test_ranks_together_write_the_combined_weight(shape, size):
    mla = SHAPES[shape]
    weights = random_weights(mla)
    expected = interleave_heads(mla, weights["w_uk"], weights["w_uv"])
    written = torch.full_like(expected, torch.nan)
    for rank in range(size):
        for factory in factories(mla, rank, size):
            for part in factory.build():
                assert part.key == PREFIX + KV_UP
                assert part.global_shape == tuple(expected.shape)
                assert part.replica_id == (0, rank, 0)
                start = part.global_offset[0]
                rows = written[start : start + len(part.data)]
                assert rows.isnan().all()  # written once
                rows.copy_(part.data)
    assert torch.equal(written, expected)


@EVERY_SIZE
@EVERY_SHAPE
def test_reading_undoes_writing(shape, size):
    for factory in factories(SHAPES[shape], size - 1, size):
        merged = factory.merge_fn([part.data for part in factory.build()])
        assert torch.equal(merged, factory.data)


def test_stacked_layers_are_an_axis_before_the_rows():
    """Layer 2 of 5, as Megatron passes it for models whose layers are all equal."""
    for factory in factories(TINY, 0, 1, offsets=((0, 2, 5),)):
        for part in factory.build():
            assert part.global_shape == (5, 128, 24)
            assert part.global_offset[0] == 2


def test_optimizer_states_come_under_their_own_key():
    (factory, _) = factories(TINY, 0, 2)
    state = replace(factory, key="optimizer.state.exp_avg." + factory.key, data=-factory.data)
    parts = state.build()
    assert {part.key for part in parts} == {"optimizer.state.exp_avg." + PREFIX + KV_UP}
    assert torch.equal(torch.cat([part.data for part in parts]), -factory.data)


def test_flattened_states_are_refused():
    """A slice of the flat parameter has no rows; taking it for some would scramble the heads."""
    (factory, _) = factories(TINY, 0, 1)
    with refusal(PREFIX + KV_UP, "flattened"):
        replace(factory, flattened_range=slice(0, 7)).build()


class TestAttention:
    @staticmethod
    def keys(entries) -> dict[str, str]:
        """Our name -> the name in the checkpoint."""
        return {k.removeprefix(PREFIX): e.key.removeprefix(PREFIX) for k, e in entries.items()}

    def test_keys_of_local_layers(self):
        keys = self.keys(build_attention(TINY, Setup()).sharded_state_dict(prefix=PREFIX))
        weights = {k: v for k, v in keys.items() if k.endswith(".weight")}
        up = {"linear_k_up_proj.weight", "linear_v_up_proj.weight"}
        assert {weights.pop(name) for name in up} == {KV_UP}
        assert all(name == key for name, key in weights.items())
        assert "q_layernorm.weight" in weights

    def test_keys_of_transformer_engine_layers(self):
        """Its standard MLA has the latent norms fused into the up-projections."""
        attention = build_attention(TINY, Setup())
        own = Attention.sharded_state_dict(attention, PREFIX)
        entries = sharded.standard_sharded_state_dict(
            own, PREFIX, (), dims=attention.dims, tp_rank=0, fused_norms=True
        )
        keys = self.keys(entries)
        assert keys["q_layernorm.weight"] == "linear_q_up_proj.layer_norm_weight"
        assert keys["kv_layernorm.weight"] == "linear_kv_up_proj.layer_norm_weight"
        assert not any(key.endswith("layernorm._extra_state") for key in keys)

    def test_entries_hold_the_parameters_themselves(self):
        """Megatron's optimizer finds a parameter's entry by its identity."""
        attention = build_attention(TINY, Setup())
        entries = attention.sharded_state_dict(prefix=PREFIX)
        for name, parameter in attention.named_parameters():
            assert entries[PREFIX + name].data is parameter
            is_up = name in ("linear_k_up_proj.weight", "linear_v_up_proj.weight")
            assert isinstance(entries[PREFIX + name], ShardedTensorFactory) == is_up
            assert isinstance(entries[PREFIX + name].data, Tensor)
