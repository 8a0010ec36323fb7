"""State dicts that do not fit: the error names the key, both shapes and the recognised layout."""

from dataclasses import replace

import pytest
import torch

from absorbed_mla import to_absorbed_state_dict, to_standard_state_dict
from tests.support.cases import TINY
from tests.support.models import gpt_model
from tests.support.refusal import refusal
from tests.support.standard import KV_UP
from tests.unit.checkpoint.test_state_dict import (
    DIMS,
    FUSED_DOWN,
    K_UP,
    KV_DOWN,
    NORMS,
    Q_DOWN,
    V_UP,
    attention_with_weights,
    in_layout,
)

COMBINED = {"kv_up": "combined", "norms": "separate", "down": "separate"}
SPLIT = {**COMBINED, "kv_up": "split"}
FUSED = {"kv_up": "combined", "norms": "fused", "down": "fused"}


def described(layout: dict) -> str:
    options = ("down", "norms", "kv_up")
    return "recognised layout: " + ", ".join(f"{name} {layout[name]}" for name in options)


def state_in(layout: dict, mla=TINY) -> dict:
    return in_layout(attention_with_weights(mla=mla).state_dict(), **layout, mla=mla)


# A layout, the key that is missing or has a row too many, and what the model needs in its place.
KEYS = [
    (COMBINED, KV_UP, (128, 24)),
    (COMBINED, KV_DOWN, (32, 32)),
    (COMBINED, Q_DOWN, (16, 32)),
    (COMBINED, "q_layernorm.weight", (16,)),
    (COMBINED, "linear_proj.weight", (32, 80)),
    (SPLIT, K_UP, (48, 24)),
    (SPLIT, V_UP, (80, 24)),
    (FUSED, FUSED_DOWN, (48, 32)),
    (FUSED, NORMS["kv_layernorm.weight"], (24,)),
]
# Our name of a weight for one of the checkpoint, which has none of ours.
OWN = {NORMS["kv_layernorm.weight"]: "kv_layernorm.weight"}


class TestAttention:
    @pytest.mark.parametrize("layout, key, needs", [row for row in KEYS if row[1] != FUSED_DOWN])
    def test_missing(self, layout, key, needs):
        state = state_in(layout)
        del state[key]
        named, needs = (K_UP, (48, 24)) if key == KV_UP else (OWN.get(key, key), needs)
        with refusal(f"{named} is missing", f"this model needs {needs}", described(layout)):
            attention_with_weights().load_state_dict(state)

    @pytest.mark.parametrize("strict", [True, False])
    @pytest.mark.parametrize("layout, key, needs", KEYS)
    def test_misshapen(self, layout, key, needs, strict):
        state = state_in(layout)
        state[key] = torch.cat((state[key], state[key][:1]))
        got, named = (needs[0] + 1, *needs[1:]), OWN.get(key, key)
        with refusal(f"{named} has shape {got}", f"this model needs {needs}", described(layout)):
            attention_with_weights().load_state_dict(state, strict=strict)

    @pytest.mark.parametrize("key", ["linear_q_proj.weight", "linear_proj.bias", "mystery"])
    @pytest.mark.parametrize("layout", [COMBINED, SPLIT, FUSED], ids=["combined", "split", "fused"])
    def test_extra(self, layout, key):
        state = {**state_in(layout), key: torch.zeros(3, 5)}
        with refusal(f"{key} of shape (3, 5)", described(layout)):
            attention_with_weights().load_state_dict(state)

    @pytest.mark.parametrize(
        "layout, key, shape, parts",
        [
            # As many elements as rows of another length would have: a view would take them.
            (COMBINED, KV_UP, (64, 48), ("(64, 48)", "(128, 24)")),
            # In both layouts of one weight: which of the two is meant cannot be known.
            (COMBINED, K_UP, (48, 24), ()),
            (FUSED, "q_layernorm.weight", (16,), ()),
            (FUSED, KV_DOWN, (32, 32), ()),
        ],
    )
    def test_no_place_for_it(self, layout, key, shape, parts):
        with refusal(key, *parts):
            state = {**state_in(layout), key: torch.zeros(shape)}
            attention_with_weights().load_state_dict(state)

    def test_strict_is_the_callers_choice(self):
        """A part of the weights, or more than them, where the caller asked for no more."""
        attention, other = attention_with_weights(0), attention_with_weights(1)
        state = state_in(COMBINED)
        del state[Q_DOWN]
        result = other.load_state_dict({**state, "mystery": torch.zeros(2)}, strict=False)
        assert result.missing_keys == [Q_DOWN] and result.unexpected_keys == ["mystery"]
        assert torch.equal(other.linear_k_up_proj.weight, attention.linear_k_up_proj.weight)

    def test_checkpoint_for_other_dimensions_lists_every_key(self):
        other = replace(TINY, kv_lora_rank=20, q_lora_rank=8)
        expected = (
            "linear_q_down_proj.weight has shape (8, 32), this model needs (16, 32)",
            "linear_kv_down_proj.weight has shape (28, 32), this model needs (32, 32)",
            "linear_k_up_proj.weight has shape (48, 20), this model needs (48, 24)",
            "kv_layernorm.weight has shape (20,), this model needs (24,)",
        )
        with refusal(*expected, described(SPLIT)):
            attention_with_weights().load_state_dict(state_in(SPLIT, mla=other))

    @pytest.mark.parametrize("given", ["with", "without"])
    def test_latent_norms(self, given):
        """A norm that one side has and the other does not is no detail."""
        bare = replace(TINY, latent_norm=False)
        source, target = (TINY, bare) if given == "with" else (bare, TINY)
        problem = "of shape (24,)" if given == "with" else "is missing, this model needs (24,)"
        state = attention_with_weights(mla=source).state_dict()
        with refusal("kv_layernorm.weight", problem):
            attention_with_weights(mla=target).load_state_dict(state)


class TestWholeModel:
    PREFIX = "decoder.layers.1.self_attention."

    @pytest.mark.parametrize("key, problem", [(K_UP, "is missing"), ("mystery", "of shape (2,)")])
    def test_names_the_layer(self, key, problem):
        model = gpt_model(num_layers=2)
        state = model.state_dict()
        if state.pop(self.PREFIX + key, None) is None:
            state[self.PREFIX + key] = torch.zeros(2)
        with refusal(self.PREFIX + key, problem, described(SPLIT)):
            model.load_state_dict(state)

    def test_shape(self):
        model = gpt_model(num_layers=2)
        state = to_standard_state_dict(model.state_dict(), DIMS)
        state[self.PREFIX + KV_UP] = torch.zeros(5, 24)
        with refusal(self.PREFIX + KV_UP, "(5, 24)", "(128, 24)", described(COMBINED)):
            model.load_state_dict(state)
        with refusal(self.PREFIX + KV_UP, "(5, 24)", "(128, 24)", described(COMBINED)):
            to_absorbed_state_dict(state, DIMS)


class TestToStandard:
    @pytest.mark.parametrize("name", ["norms", "down"])
    def test_unknown_layout(self, name):
        with refusal(name, "separate, fused", "got 'both'"):
            to_standard_state_dict({}, DIMS, **{name: "both"})

    @pytest.mark.parametrize("key, needs", [(K_UP, (48, 24)), (V_UP, (80, 24))])
    def test_shape(self, key, needs):
        state = {**attention_with_weights().state_dict(), key: torch.zeros(4, 24)}
        with refusal(key, "(4, 24)", f"needs {needs}"):
            to_standard_state_dict(state, DIMS)

    @pytest.mark.parametrize("key", [K_UP, V_UP, Q_DOWN, KV_DOWN])
    def test_missing(self, key):
        state = attention_with_weights().state_dict()
        del state[key]
        with refusal(f"{key} is missing"):
            to_standard_state_dict(state, DIMS, prefix="", down="fused")

    def test_fused_down_projections_without_a_query_latent(self):
        attention = attention_with_weights(mla=replace(TINY, q_lora_rank=None))
        with refusal("down", "q_lora_rank"):
            to_standard_state_dict(attention.state_dict(), attention.dims, down="fused")
