"""The spec of HybridModel's stack: what it builds, what it leaves to Megatron, what it refuses."""

import pytest
import torch
from megatron.core.models.hybrid import hybrid_layer_specs as megatron_specs
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import import_module

import specs.absorbed_mla_parts as absorbed_mla_parts
from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.attention import AbsorbedMLASelfAttention
from absorbed_mla.norm import RMSNorm
from specs.absorbed_mla_hybrid_specs import (
    absorbed_mla_hybrid_stack_spec,
    get_absorbed_mla_hybrid_stack_spec,
)
from tests.support.cases import TINY, config_for
from tests.support.hybrid import hybrid_model
from tests.support.models import MIXED, call, token_batch
from tests.support.refusal import refusal

OPTIONS = AbsorbedMLAOptions(form="absorbed", down_projection="column_parallel")


def attentions(model) -> list[AbsorbedMLASelfAttention]:
    return [m for m in model.modules() if isinstance(m, AbsorbedMLASelfAttention)]


def test_layers_of_a_pattern():
    model = hybrid_model("+-+E/+-", **MIXED)
    layers = model.decoder.layers
    assert [type(layer.self_attention) for layer in layers[::2]] == [AbsorbedMLASelfAttention] * 2
    assert [type(layer.mlp) for layer in layers[1::2]] == [MLP, MoELayer]
    assert isinstance(model.decoder.final_norm, RMSNorm)
    [mtp] = model.mtp.layers
    assert len(attentions(mtp)) == 1 and isinstance(mtp.final_layernorm, RMSNorm)
    call(model, labels=token_batch(6)).mean().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]


def test_options_travel():
    """Into multi-token prediction, too."""
    config = config_for(TINY, num_layers=2)
    spec = get_absorbed_mla_hybrid_stack_spec(config, backend="local", options=OPTIONS)
    model = hybrid_model("+-/+-", spec=spec)
    assert [attention.options for attention in attentions(model)] == [OPTIONS] * 2


@pytest.mark.parametrize("pattern", ["+-", "+-+E"])
def test_spec_option(pattern):
    """Megatron's builders take what ``--spec`` imports as the stack's spec, and call nothing."""
    spec = import_module(["specs.absorbed_mla_hybrid_specs", "absorbed_mla_hybrid_stack_spec"])
    assert spec is absorbed_mla_hybrid_stack_spec
    # Both with TransformerEngine's layers where that is installed.
    made = get_absorbed_mla_hybrid_stack_spec(config_for(TINY, torch.float32, **MIXED))
    by_function, imported = (hybrid_model(pattern, spec=one, **MIXED) for one in (made, spec))
    imported.load_state_dict(by_function.state_dict())
    assert torch.equal(call(imported), call(by_function))


def test_latent_norms_are_the_configs():
    """What ``--spec`` imports was made without a config."""
    for on in (True, False):
        model = hybrid_model("+-", spec=absorbed_mla_hybrid_stack_spec, qk_layernorm=on)
        [attention] = attentions(model)
        assert isinstance(attention.kv_layernorm, RMSNorm) == on


@pytest.mark.parametrize("pattern", ["+-", "+-/+-"])
def test_megatrons_fused_attention_does_not_take_our_place(pattern):
    """Its stack would exchange the class of the attention, without a word."""
    model = hybrid_model(pattern, spec=absorbed_mla_hybrid_stack_spec, mla_down_proj_fusion=True)
    assert len(attentions(model)) == pattern.count("+")
    for attention in attentions(model):
        assert type(attention) is AbsorbedMLASelfAttention
        assert hasattr(attention, "linear_qkv_down_proj")
    separate = hybrid_model(pattern, spec=absorbed_mla_hybrid_stack_spec)
    separate.load_state_dict(model.state_dict())
    torch.testing.assert_close(call(separate), call(model), atol=1e-6, rtol=1e-6)


class TestWithTransformerEngine:
    """As if it were installed, as far as specs look at it; the layers are built on GPUs only."""

    def test_other_layers_are_megatrons_own(self, monkeypatch):
        monkeypatch.setattr(absorbed_mla_parts, "HAVE_TE", True)
        own = get_absorbed_mla_hybrid_stack_spec(config_for(TINY)).submodules
        theirs = megatron_specs.hybrid_stack_spec.submodules
        same = {name for name, spec in vars(own).items() if spec is getattr(theirs, name)}
        assert same == set(vars(theirs)) - {"mla_layer"}

    def test_megatrons_spec_is_left_alone(self):
        get_absorbed_mla_hybrid_stack_spec(config_for(TINY), backend="local")
        theirs = megatron_specs.hybrid_stack_spec.submodules
        assert "AbsorbedMLAAttentionLayer" not in str(theirs.mla_layer)
        assert "RMSNorm" not in str(theirs.mlp_layer)


LOCAL = "backend='local' has +, -, E"
REFUSED = {
    **{f"+-{symbol}-": ("hybrid_layer_pattern", f"has {symbol},", LOCAL) for symbol in "MGD"},
    "*-": ("hybrid_layer_pattern", "has *,", "backend='transformer_engine'"),
    # In a stack of Megatron's own class.
    "+-/M": ("hybrid_layer_pattern", LOCAL),
    # Megatron's own refusal.
    "+-*-": ("both Attention and MLA",),
}


@pytest.mark.parametrize("pattern", REFUSED)
def test_refused_patterns(pattern):
    spec = get_absorbed_mla_hybrid_stack_spec(config_for(TINY), backend="local")
    with refusal(*REFUSED[pattern]):
        hybrid_model(pattern, spec=spec)


def test_refused(monkeypatch):
    """Before any layer is built."""
    monkeypatch.setattr(absorbed_mla_parts, "HAVE_TE", False)
    with refusal("backend='transformer_engine'", "not installed"):
        get_absorbed_mla_hybrid_stack_spec(config_for(TINY), backend="transformer_engine")
    with refusal("normalization='LayerNorm'"):
        get_absorbed_mla_hybrid_stack_spec(config_for(TINY, normalization="LayerNorm"))
