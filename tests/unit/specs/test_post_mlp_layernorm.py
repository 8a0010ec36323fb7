"""The norm of experts' output, in every kind of layer that may have it."""

from __future__ import annotations

import pytest
import torch

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.moe_layer import NormedMoE
from absorbed_mla.serving.experts.layer import GroupedMoE, group_experts
from specs.absorbed_mla_hybrid_specs import get_absorbed_mla_hybrid_stack_spec
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from specs.absorbed_mla_mtp_specs import get_absorbed_mla_mtp_block_spec
from tests.support import needs
from tests.support.cases import TINY, config_for
from tests.support.models import MIXED, call, gpt_model, logits, with_own_norms

pytestmark = needs.no_gpu
OPTIONS = AbsorbedMLAOptions(post_mlp_layernorm=True)


def normed_model(change=lambda spec: spec, **fields):
    """In float64, with norms that are not all ones."""
    fields = {**MIXED, "layernorm_epsilon": 1e-2, **fields}
    config = config_for(TINY, torch.float64, **fields)
    spec = get_absorbed_mla_decoder_block_spec(config, backend="local", options=OPTIONS)
    return with_own_norms(gpt_model(spec=change(spec), dtype=torch.float64, **fields), 3)


def test_output():
    """Of routed and shared experts together, before the residual connection; dense layers as is."""
    model = normed_model().eval()
    names = {name for name, _ in model.named_parameters() if "post_mlp" in name}
    assert names == {f"decoder.layers.{i}.mlp.post_mlp_layernorm.weight" for i in (1, 2)}
    layer, x = model.decoder.layers[1].mlp, torch.randn(5, 2, TINY.hidden, dtype=torch.float64)
    with torch.no_grad():
        found, norm = layer(x)[0], layer.post_mlp_layernorm
        layer.post_mlp_layernorm = None
        plain = layer(x)[0]
    scale = (plain.square().mean(-1, keepdim=True) + 1e-2).rsqrt()
    torch.testing.assert_close(found, plain * scale * norm.weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("modules", [["moe"], ["shared_experts"], None], ids=str)
def test_recomputation(modules):
    kind = {"recompute_granularity": "selective", "recompute_modules": modules}
    if modules is None:
        kind = {"recompute_granularity": "full", "recompute_method": "uniform"}
        kind["recompute_num_layers"] = 1
    gradients = []
    for fields in ({}, kind):
        model = normed_model(**fields)
        call(model).square().sum().backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient), name
        assert gradient.any() or "norm" not in name, name


def test_grouped_experts():
    model, grouped = normed_model().eval(), normed_model(group_experts).eval()
    assert type(grouped.decoder.layers[1].mlp) is GroupedMoE
    torch.testing.assert_close(logits(grouped), logits(model), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["local", "transformer_engine"])
def test_other_specs(monkeypatch, backend):
    """Of multi-token prediction, and of HybridModel's layers."""
    if backend == "transformer_engine":
        monkeypatch.setattr("specs.absorbed_mla_parts.HAVE_TE", True)
    config = config_for(TINY, **MIXED, mtp_num_layers=1)
    hybrid = get_absorbed_mla_hybrid_stack_spec(config, backend=backend, options=OPTIONS)
    [mtp] = get_absorbed_mla_mtp_block_spec(config, backend="local", options=OPTIONS).layer_specs
    for layer in (hybrid.submodules.moe_layer, mtp.submodules.mtp_model_layer):
        assert layer.submodules.mlp.func is NormedMoE
