"""Checkpoints of models some of whose layers adapters wrap, under other names than before."""

import pytest
from megatron.core import dist_checkpointing
from torch import nn

from tests.support.adapters import wrap
from tests.support.models import call, gpt_model
from tests.support.refusal import refusal

ALL = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_proj")


def wrapped(*names: str, seed: int = 0, **fields) -> nn.Module:
    model = gpt_model(num_layers=1, seed=seed, **fields)
    for name in names:
        wrap(model.decoder.layers[0].self_attention, name)
    return model


@pytest.mark.parametrize("names", [*((name,) for name in ALL), ALL], ids=str)
def test_a_training_goes_on(names, tmp_path):
    saved, loaded = wrapped(*names), wrapped(*names, seed=1)
    expected = call(saved)
    dist_checkpointing.save(saved.sharded_state_dict(), str(tmp_path))
    state = dist_checkpointing.load(loaded.sharded_state_dict(), str(tmp_path))
    loaded.load_state_dict(state)
    assert call(loaded).equal(expected)


def test_entries_have_the_wrappers_names():
    """And the standard's for all else, which Megatron's own attention loads strictly."""
    plain = wrapped().sharded_state_dict()
    entries = wrapped("linear_kv_down_proj").sharded_state_dict()
    whole, rest = (
        {key for key in found if "linear_kv_down_proj" not in key} for found in (plain, entries)
    )
    assert whole == rest
    name = "decoder.layers.0.self_attention.linear_kv_down_proj."
    found = {key.removeprefix(name) for key in entries.keys() - rest}
    assert found == {"down", "up", "to_wrap.weight", "to_wrap._extra_state"}


def test_fused_down_projections():
    entries = wrapped("linear_qkv_down_proj", mla_down_proj_fusion=True).sharded_state_dict()
    assert any(key.endswith("linear_qkv_down_proj.to_wrap.weight") for key in entries)


@pytest.mark.parametrize("name", ["linear_k_up_proj", "linear_v_up_proj"])
def test_layers_that_are_no_layers(name):
    with refusal(name, "adapter"):
        wrapped(name).sharded_state_dict()
