"""Megatron's marks on parameters, after state dicts were loaded in every way torch has."""

import copy
import pickle

import pytest
import torch

from tests.support import world
from tests.support.cases import TINY, random_weights
from tests.support.harness import Setup, build_attention, load_weights
from tests.support.refusal import refusal
from tests.unit.checkpoint.test_state_dict import in_layout

FUSED = {"kv_up": "combined", "norms": "fused", "down": "fused"}


def attention_and_state(**layout):
    setup = Setup()
    attention = build_attention(TINY, setup)
    load_weights(attention, TINY, setup, random_weights(TINY))
    state = {name: value for name, value in attention.state_dict().items() if value is not None}
    return attention, in_layout(state, **layout, mla=TINY) if layout else state


def marks(attention) -> dict[str, dict]:
    return {name: dict(vars(p)) for name, p in attention.named_parameters()}


@pytest.mark.parametrize("layout", [{}, FUSED], ids=["own", "fused"])
def test_assigning_keeps_them(layout):
    attention, state = attention_and_state(**layout)
    before = marks(attention)
    old = dict(attention.named_parameters())
    attention.load_state_dict({k: copy.deepcopy(v) for k, v in state.items()}, assign=True)
    new = dict(attention.named_parameters())
    assert all(old[name] is not new[name] for name in old)
    assert before["linear_k_up_proj.weight"]["tensor_model_parallel"]
    assert "sequence_parallel" in before["kv_layernorm.weight"]
    assert marks(attention) == before


def test_swapping_keeps_them():
    """What ``torch.__future__`` makes of a plain load."""
    attention, state = attention_and_state()
    before = marks(attention)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        attention.load_state_dict({k: v.clone() for k, v in state.items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert marks(attention) == before


def test_one_layer_alone():
    attention, _ = attention_and_state()
    layer = attention.linear_kv_down_proj
    before = dict(vars(layer.weight))
    state = {"weight": torch.zeros_like(layer.weight)}
    layer.load_state_dict(state, assign=True, strict=False)
    assert dict(vars(layer.weight)) == before


def test_halves_of_a_fused_weight_get_memory_of_their_own(tmp_path):
    attention, state = attention_and_state(**FUSED)
    attention.load_state_dict(state, assign=True)
    memories = [p.untyped_storage().data_ptr() for p in attention.parameters()]
    assert len(set(memories)) == len(memories)
    for parameter in attention.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


def test_a_weight_of_its_own_is_taken_as_it_is():
    """No copy is made where none is needed: that is what assigning is for."""
    attention, state = attention_and_state()
    attention.load_state_dict(state, assign=True)
    assert attention.linear_proj.weight.data_ptr() == state["linear_proj.weight"].data_ptr()


@pytest.mark.parametrize("mark", ["main_grad", "main_param"])
def test_parameters_that_others_hold(mark):
    attention, state = attention_and_state()
    setattr(attention.linear_kv_down_proj.weight, mark, torch.zeros(1))
    with refusal("assign=True", "linear_kv_down_proj.weight", mark, "assign=False"):
        attention.load_state_dict(state, assign=True)
    attention.load_state_dict(state)


def test_explained_keys_travel():
    """Between processes, as torch.distributed.checkpoint sends what it could not load."""
    attention, state = attention_and_state()
    del state["linear_proj.weight"]
    keys = attention.load_state_dict(state, strict=False).missing_keys
    [key] = [k for k in keys if "linear_proj" in k]
    for found in (pickle.loads(pickle.dumps(key)), copy.deepcopy(key), copy.copy(key)):
        assert found == "linear_proj.weight" and type(found) is type(key)
        assert f"{found}" == f"{key}" != found
    assert world.size() == 1
