"""State dicts in every layout that Megatron's MLA writes, into the attention and out of it.

Loading only moves data, so everything is compared bit for bit. The layouts are put together here,
from tests.support.standard, not by the package.
"""

import itertools
import weakref
from dataclasses import replace

import pytest
import torch

from absorbed_mla import MLADims, to_absorbed_state_dict, to_standard_state_dict
from tests.support import world
from tests.support.cases import TINY, VARIANTS, config_for, random_weights
from tests.support.harness import Setup, build_attention, load_weights
from tests.support.models import MIXED, gpt_model, logits
from tests.support.refusal import refusal
from tests.support.standard import KV_UP, interleave_heads

SETUP = Setup(dtype=torch.float32)
DIMS = MLADims.from_config(config_for(TINY), 1)
Q_DOWN, KV_DOWN, FUSED_DOWN = (f"linear_{name}_down_proj.weight" for name in ("q", "kv", "qkv"))
K_UP, V_UP = "linear_k_up_proj.weight", "linear_v_up_proj.weight"
FUSED_INPUT_NORM = "linear_qkv_down_proj.layer_norm_weight"
NORMS = {
    "q_layernorm.weight": "linear_q_up_proj.layer_norm_weight",
    "kv_layernorm.weight": "linear_kv_up_proj.layer_norm_weight",
}
LAYOUTS = [
    {"kv_up": kv_up, "norms": norms, "down": down}
    for kv_up, norms, down in itertools.product(
        ("combined", "split"), ("separate", "fused"), ("separate", "fused")
    )
]
EXTRA_STATES = {
    "absent": None,
    "empty": torch.empty(0, dtype=torch.uint8),
    "bytes": torch.arange(7, dtype=torch.uint8),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: "-".join(x.values()))


def attention_with_weights(seed: int = 0, mla=TINY):
    attention = build_attention(mla, SETUP)
    load_weights(attention, mla, SETUP, random_weights(mla, seed))
    return attention


def without_extra_states(state: dict) -> dict:
    return {key: value for key, value in state.items() if not key.endswith("_extra_state")}


def in_layout(own: dict, kv_up: str, norms: str, down: str, prefix: str = "", mla=TINY) -> dict:
    """Our state dict, rearranged under ``prefix`` as Megatron writes it."""
    state = without_extra_states(own)
    if kv_up == "combined":
        k_up, v_up = state.pop(prefix + K_UP), state.pop(prefix + V_UP)
        state[prefix + KV_UP] = interleave_heads(mla, k_up, v_up)
    if norms == "fused":
        for separate, fused in NORMS.items():
            state[prefix + fused] = state.pop(prefix + separate)
    if down == "fused":
        parts = [state.pop(prefix + Q_DOWN), state.pop(prefix + KV_DOWN)]
        state[prefix + FUSED_DOWN] = torch.cat(parts)
    return state


def assert_same(actual: dict, expected: dict) -> None:
    actual, expected = without_extra_states(actual), without_extra_states(expected)
    assert set(actual) == set(expected)
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


class TestRoundTrip:
    @pytest.mark.parametrize("extra", EXTRA_STATES)
    @every_layout
    def test_attention(self, layout, extra):
        source, target = attention_with_weights(0), attention_with_weights(1)
        state = in_layout(source.state_dict(), **layout)
        if EXTRA_STATES[extra] is not None:
            modules = {key.rpartition(".")[0] for key in state if "_proj" in key}
            for module in (*modules, "core_attention", "kv_layernorm"):
                state[f"{module}._extra_state"] = EXTRA_STATES[extra]
        given = dict(state)
        target.load_state_dict(state)
        assert_same(target.state_dict(), source.state_dict())
        assert state.keys() == given.keys()  # the caller's dict is the caller's
        if layout["kv_up"] == "combined":
            options = {name: layout[name] for name in ("norms", "down")}
            written = to_standard_state_dict(target.state_dict(), DIMS, **options)
            assert_same(written, given)

    @every_layout
    def test_whole_model(self, layout):
        """With layers in front of the attention's and others behind, in one call."""
        source, target = gpt_model(seed=0, **MIXED), gpt_model(seed=1, **MIXED)
        state = source.state_dict()
        for i in range(MIXED["num_layers"]):
            state = in_layout(state, **layout, prefix=f"decoder.layers.{i}.self_attention.")
        target.load_state_dict(state)
        assert_same(target.state_dict(), source.state_dict())
        assert torch.equal(logits(target), logits(source))
        assert_same(to_absorbed_state_dict(state, DIMS), source.state_dict())
        if layout["kv_up"] == "combined":
            options = {name: layout[name] for name in ("norms", "down")}
            assert_same(to_standard_state_dict(source.state_dict(), DIMS, **options), state)

    @pytest.mark.parametrize(
        "mla",
        [
            replace(TINY, q_lora_rank=None),
            replace(TINY, latent_norm=False),
            VARIANTS["all_variants"],
        ],
    )
    def test_layers_of_other_parts(self, mla):
        source, target = (attention_with_weights(seed, mla) for seed in (0, 1))
        state = in_layout(source.state_dict(), "combined", "separate", "separate")
        target.load_state_dict(state)
        assert_same(target.state_dict(), source.state_dict())
        assert_same(to_standard_state_dict(target.state_dict(), target.dims), state)

    def test_extra_states_are_written_for_layers_of_the_standard(self):
        written = to_standard_state_dict(attention_with_weights().state_dict(), DIMS)
        extra = {key.rpartition(".")[0] for key in written if key.endswith("_extra_state")}
        assert "linear_kv_up_proj" in extra
        assert not extra & {"linear_k_up_proj", "linear_v_up_proj", "core_attention"}

    @every_layout
    def test_nothing_of_the_dict_is_kept(self, layout):
        """A copy of every weight, held from loading on, would be found on a full device only."""
        state = in_layout(attention_with_weights().state_dict(), **layout)
        state = {key: tensor.clone() for key, tensor in state.items()}
        tensors = {key: weakref.ref(tensor) for key, tensor in state.items()}
        target = attention_with_weights(1)
        target.load_state_dict(state)
        del state
        assert [key for key, tensor in tensors.items() if tensor() is not None] == []

    def test_prefix_selects_one_attention(self):
        state = gpt_model(num_layers=2).state_dict()
        first, second = (f"decoder.layers.{i}.self_attention." for i in range(2))
        written = to_standard_state_dict(state, DIMS, prefix=second)
        assert second + KV_UP in written and second + K_UP not in written
        assert first + K_UP in written and first + KV_UP not in written
        assert_same(to_absorbed_state_dict(written, DIMS, prefix=second), state)


class TestInputNorm:
    """Fused down-projections may bring the norm in front of the attention with them."""

    @staticmethod
    def fused(model) -> dict:
        state = without_extra_states(model.state_dict())
        for i in range(2):
            layer = f"decoder.layers.{i}."
            state = in_layout(state, "combined", "fused", "fused", prefix=f"{layer}self_attention.")
            norm = state.pop(f"{layer}input_layernorm.weight")
            state[f"{layer}self_attention.{FUSED_INPUT_NORM}"] = norm
        return state

    @pytest.fixture
    def models(self):
        source, target = gpt_model(num_layers=2), gpt_model(num_layers=2, seed=1)
        with torch.no_grad():
            for layer in source.decoder.layers:
                layer.input_layernorm.weight.uniform_(0.5, 2)
        return source, target

    def test_converted(self, models):
        source, target = models
        target.load_state_dict(to_absorbed_state_dict(self.fused(source), DIMS))
        assert_same(target.state_dict(), source.state_dict())

    @pytest.mark.parametrize("down", ["separate", "fused"])
    def test_converted_for_fused_down_projections(self, models, down):
        """Megatron's own fused layers to ours, which keep the norm in front."""
        source, _ = models
        theirs = self.fused(source)
        target = gpt_model(num_layers=2, seed=1, mla_down_proj_fusion=True)
        converted = to_absorbed_state_dict(theirs, DIMS, down=down)
        target.load_state_dict(converted)
        if down == "fused":
            assert_same(converted, target.state_dict())
        assert torch.equal(logits(target), logits(source))
        assert_same(to_absorbed_state_dict(target.state_dict(), DIMS), source.state_dict())

    @pytest.mark.parametrize("strict", [True, False])
    def test_loaded_by_the_model_unconverted(self, models, strict):
        """Lost, it would leave the norm at its initial ones, and the model quietly wrong.

        torch hands an attention a copy of its part of the state dict, so it cannot pass the norm
        on to the layer: only the error can say what to do.
        """
        source, target = models
        with refusal(FUSED_INPUT_NORM, "input_layernorm.weight", "to_absorbed_state_dict"):
            target.load_state_dict(self.fused(source), strict=strict)

    def test_attention_alone_has_no_place_for_it(self):
        attention = attention_with_weights()
        state = in_layout(attention.state_dict(), "combined", "fused", "fused")
        state[FUSED_INPUT_NORM] = torch.ones(TINY.hidden)
        with refusal(FUSED_INPUT_NORM, "input_layernorm.weight", "to_absorbed_state_dict"):
            attention.load_state_dict(state)
        with refusal(FUSED_INPUT_NORM, "input_layernorm.weight", "to_absorbed_state_dict"):
            to_absorbed_state_dict(state, DIMS)


class TestValues:
    def test_rows_of_the_combined_weight(self):
        """Two heads: [K0 K0 V0 V0 V0 K1 K1 V1 V1 V1]."""
        dims = replace(DIMS, num_heads_per_rank=2, qk_nope_head_dim=2, v_head_dim=3, kv_lora_rank=1)
        combined = torch.arange(10.0)[:, None]
        split = to_absorbed_state_dict({KV_UP: combined}, dims, "")
        assert split[K_UP].flatten().tolist() == [0, 1, 5, 6]
        assert split[V_UP].flatten().tolist() == [2, 3, 4, 7, 8, 9]
        assert torch.equal(to_standard_state_dict(split, dims, prefix="")[KV_UP], combined)

    @pytest.mark.parametrize("shards", [1, 2, 4])
    def test_rows_of_the_fused_down_projection(self, shards):
        """Each rank of a sharded one holds its share of both parts: [Q/tp; KV/tp]."""
        q_rows, kv_rows = DIMS.q_lora_rank // shards, DIMS.kv_down_dim // shards
        rows = torch.arange(float(q_rows + kv_rows))[:, None].expand(-1, DIMS.hidden_size)
        state = to_absorbed_state_dict({FUSED_DOWN: rows, KV_UP: torch.zeros(128, 24)}, DIMS, "")
        assert state[Q_DOWN][:, 0].tolist() == list(range(q_rows))
        assert state[KV_DOWN][:, 0].tolist() == list(range(q_rows, q_rows + kv_rows))

    def test_control_with_rows_not_interleaved_by_head(self):
        """[all K; all V] has the right shape and loads: only the numbers tell."""
        source, target = attention_with_weights(0), attention_with_weights(1)
        x = torch.randn(9, 2, TINY.hidden, device=world.device())
        expected = source(x, None)[0]
        state = in_layout(source.state_dict(), "combined", "separate", "separate")
        target.load_state_dict(state)
        assert torch.equal(target(x, None)[0], expected)
        own = source.state_dict()
        target.load_state_dict({**state, KV_UP: torch.cat((own[K_UP], own[V_UP]))})
        control = target(x, None)[0]
        assert (control - expected).norm() > 0.1 * expected.norm()
