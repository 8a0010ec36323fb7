"""A spec that needs no config: what ``--spec`` imports for programs that call no spec function."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module, import_module

from absorbed_mla import AbsorbedMLAOptions
from specs.absorbed_mla_layer_specs import (
    absorbed_mla_layer_spec,
    get_absorbed_mla_decoder_block_spec,
)
from specs.absorbed_mla_layers import AbsorbedMLATransformerLayer, spec_by_config
from specs.absorbed_mla_parts import LayerParts
from tests.support.cases import TINY, config_for
from tests.support.models import MIXED, call, gpt_model
from tests.support.refusal import refusal
from tests.unit.specs.test_specs import FREQ, PIPELINES, pipeline_stages

KINDS = {False: MLP, True: MoELayer}


@pytest.mark.parametrize("changes", [{"num_layers": 2}, MIXED], ids=["dense", "mixed"])
def test_is_the_block_specs_model(changes):
    """``gpt_builder`` gives GPTModel what it imports; same weights, same logits."""
    spec = import_module(["specs.absorbed_mla_layer_specs", "absorbed_mla_layer_spec"])
    assert spec is absorbed_mla_layer_spec
    # Both with TransformerEngine's layers where that is installed.
    block = get_absorbed_mla_decoder_block_spec(config_for(TINY, torch.float32, **changes))
    by_block = gpt_model(spec=block, **changes)
    imported = gpt_model(spec=spec, **changes)
    # The host's final norm may be TransformerEngine's, with an (empty) extra state.
    extra = {key: None for key in imported.state_dict() if key.endswith("_extra_state")}
    imported.load_state_dict({**extra, **by_block.state_dict()})
    torch.testing.assert_close(call(imported), call(by_block))


def test_options_travel():
    parts = LayerParts("local", AbsorbedMLAOptions(form="absorbed", latent_norm_eps=1e-3))
    spec = spec_by_config(AbsorbedMLATransformerLayer, parts)
    layer = build_module(spec, config=config_for(TINY), layer_number=1)
    assert layer.self_attention.options == parts.options
    assert layer.self_attention.kv_layernorm.eps == 1e-3


@pytest.mark.parametrize("name", PIPELINES)
def test_layers_know_their_place_in_the_model(name, monkeypatch):
    """A layer is given its number in the stage; which kind it is depends on that in the model."""
    for config, rank, vp_stage, layers in pipeline_stages(name, monkeypatch):
        monkeypatch.setattr("specs.absorbed_mla_layers.get_pg_rank", lambda group, rank=rank: rank)
        for number, index in enumerate(layers, start=1):
            layer = build(config, number, vp_stage=vp_stage)
            assert type(layer.mlp) is KINDS[bool(FREQ[index])]


def test_numbers_of_the_whole_model():
    config = config_for(TINY, **MIXED)
    kinds = [type(build(config, n, add_layer_offset=False).mlp) for n in (1, 2, 3)]
    assert kinds == [MLP, MoELayer, MoELayer]


def test_mtp_is_like_the_last_layer():
    assert type(build(config_for(TINY, **MIXED), 1, is_mtp_layer=True).mlp) is MoELayer


def test_pattern_that_is_none():
    config = config_for(TINY, num_layers=3)
    config.num_moe_experts, config.moe_layer_freq = 2, [0, 1]
    with refusal("moe_layer_freq", "num_layers=3"):
        build(config, 1)


def build(config, number: int, **host):
    return build_module(absorbed_mla_layer_spec, config=config, layer_number=number, **host)
