"""Layer and block specs inside Megatron's own layer, block, model and ``--spec`` option."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module, import_module
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

import specs.absorbed_mla_layer_specs as layer_specs
import specs.absorbed_mla_parts as absorbed_mla_parts
from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.core_attention.module import LatentCoreAttention
from absorbed_mla.linear import DuplicatedLinear, HeadwiseUpProjection
from absorbed_mla.norm import RMSNorm
from specs.absorbed_mla_layer_specs import (
    absorbed_mla_layer_spec,
    get_absorbed_mla_decoder_block_spec,
    get_absorbed_mla_layer_spec,
)
from specs.absorbed_mla_layers import AbsorbedMLATransformerLayer, spec_by_config
from specs.absorbed_mla_parts import LayerParts
from tests.support.cases import TINY, config_for
from tests.support.models import BLOCK_SPECS, MIXED, call, gpt_model, token_batch
from tests.support.refusal import refusal

SPECS = ["get_absorbed_mla_layer_spec", "get_absorbed_mla_decoder_block_spec"]
OPTIONS = AbsorbedMLAOptions(
    form="absorbed", down_projection="column_parallel", latent_norm_eps=1e-3, query_chunk_size=5
)


def missing_gradients(module) -> list[str]:
    return [name for name, p in module.named_parameters() if p.grad is None or not p.grad.any()]


class TestLayer:
    def test_options_travel(self):
        config = config_for(TINY)
        spec = get_absorbed_mla_layer_spec(config, backend="local", options=OPTIONS)
        attention = build_module(spec, config=config, layer_number=1).self_attention
        assert attention.options == attention.core_attention.options == OPTIONS
        assert not isinstance(attention.linear_kv_down_proj, DuplicatedLinear)
        assert attention.q_layernorm.eps == attention.kv_layernorm.eps == 1e-3
        assert attention.core_attention.attn_mask_type is AttnMaskType.causal

    def test_norms_are_left_out_on_request(self):
        config = config_for(replace(TINY, latent_norm=False))
        spec = get_absorbed_mla_layer_spec(config, backend="local")
        parts = spec.submodules.self_attention.submodules
        assert parts.q_layernorm is parts.kv_layernorm is IdentityOp

    def test_defaults(self):
        config = config_for(TINY, layernorm_epsilon=3e-4)
        spec = get_absorbed_mla_layer_spec(config, backend="local")
        layer = build_module(spec, config=config, layer_number=1)
        attention = layer.self_attention
        assert attention.options == AbsorbedMLAOptions()
        assert isinstance(attention.linear_kv_down_proj, DuplicatedLinear)
        assert isinstance(attention.core_attention, LatentCoreAttention)
        assert isinstance(attention.linear_k_up_proj, HeadwiseUpProjection)
        assert attention.kv_layernorm.eps == 3e-4
        assert isinstance(layer.input_layernorm, RMSNorm)
        assert isinstance(layer.pre_mlp_layernorm, RMSNorm)


@pytest.mark.parametrize("recompute", [(), ("mla_up_proj", "core_attn")])
@pytest.mark.parametrize("name", SPECS)
def test_models_train(name, recompute):
    """With the block spec, and with one layer spec for every layer, as ``--spec`` passes it."""
    changes = {"num_layers": 2}
    if recompute:
        changes |= {"recompute_granularity": "selective", "recompute_modules": list(recompute)}
    spec = getattr(layer_specs, name)(config_for(TINY, **changes), backend="local", options=OPTIONS)
    model = gpt_model(spec=spec, **changes)
    assert [type(layer) for layer in model.decoder.layers] == [TransformerLayer] * 2
    assert all(layer.self_attention.options == OPTIONS for layer in model.decoder.layers)
    call(model, labels=token_batch(6)).mean().backward()
    assert missing_gradients(model.decoder) == []


@pytest.mark.parametrize("name", SPECS)
def test_spec_option(name, monkeypatch):
    """Megatron's ``--spec MODULE NAME``; it calls what it finds with the config alone."""
    monkeypatch.setattr(absorbed_mla_parts, "HAVE_TE", False)
    get_spec = import_module(["specs.absorbed_mla_layer_specs", name])
    assert get_spec is getattr(layer_specs, name)
    assert torch.isfinite(call(gpt_model(spec=get_spec(config_for(TINY))))).all()


class TestBlock:
    @pytest.mark.parametrize(
        "freq, kinds",
        [(1, "MMMM"), (2, "MDMD"), (3, "MDDM"), ([0, 1, 1, 0], "DMMD"), ([0] * 4, "DDDD")],
        ids=str,
    )
    def test_pattern_of_moe_layers(self, freq, kinds):
        """M for a mixture of experts, D for dense; Megatron reads the option alike."""
        fields = {**MIXED, "num_layers": 4, "moe_layer_freq": freq}
        layer = get_absorbed_mla_layer_spec(config_for(TINY, **fields), backend="local")
        for model in (
            *(gpt_model(kind, **fields) for kind in BLOCK_SPECS),
            gpt_model(spec=layer, **fields),
        ):
            types = {MLP: "D", MoELayer: "M"}
            assert "".join(types[type(layer.mlp)] for layer in model.decoder.layers) == kinds

    def test_pattern_means_nothing_without_experts(self):
        config = config_for(TINY, num_layers=3)
        config.moe_layer_freq = [0, 1, 1]
        spec = get_absorbed_mla_decoder_block_spec(config, backend="local")
        block = TransformerBlock(config, spec)
        assert [type(layer.mlp) for layer in block.layers] == [MLP] * 3


@pytest.mark.parametrize("changes", [{"num_layers": 2}, MIXED], ids=["dense", "mixed"])
@pytest.mark.parametrize("kind", ["layer", "imported"])
def test_every_spec_builds_the_same_model(kind, changes):
    """Same weights, same logits; with TransformerEngine's layers where that is installed."""
    config = config_for(TINY, torch.float32, **changes)
    spec = get_absorbed_mla_layer_spec(config) if kind == "layer" else absorbed_mla_layer_spec
    by_block = gpt_model(spec=get_absorbed_mla_decoder_block_spec(config), **changes)
    by_layer = gpt_model(spec=spec, **changes)
    # The host's final norm may be TransformerEngine's, with an (empty) extra state.
    extra = {key: None for key in by_layer.state_dict() if key.endswith("_extra_state")}
    by_layer.load_state_dict({**extra, **by_block.state_dict()})
    torch.testing.assert_close(call(by_layer), call(by_block))


# (stages, virtual stages, layers per (rank, virtual stage), config fields); eight layers.
PIPELINES = {
    "even": (2, None, {(0, None): [0, 1, 2, 3], (1, None): [4, 5, 6, 7]}, {}),
    "virtual": (
        2,
        2,
        {(0, 0): [0, 1], (1, 0): [2, 3], (0, 1): [4, 5], (1, 1): [6, 7]},
        {"virtual_pipeline_model_parallel_size": 2},
    ),
    "short_first_stage": (
        2,
        None,
        {(0, None): [0, 1], (1, None): [2, 3, 4, 5, 6, 7]},
        {"num_layers_in_first_pipeline_stage": 2},
    ),
    "layout": (
        2,
        2,
        {(0, 0): [0], (1, 0): [1, 2, 3], (0, 1): [4, 5, 6], (1, 1): [7]},
        {
            "virtual_pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": [
                ["embedding", "decoder"],
                ["decoder"] * 3,
                ["decoder"] * 3,
                ["decoder", "loss"],
            ],
        },
    ),
}


# Which layers of that model have experts.
FREQ = [0, 1, 1, 0, 1, 0, 0, 1]


class Stage(NamedTuple):
    """A stage that this process passes for; ``layers`` are its layers' indices in the model."""

    config: MLATransformerConfig
    rank: int
    vp_stage: int | None
    layers: list[int]


def pipeline_stages(name: str, monkeypatch) -> Iterator[Stage]:
    """The stages of one of ``PIPELINES`` over a model of dense and MoE layers, one by one."""
    stages, virtual, expected, fields = PIPELINES[name]
    config = config_for(
        TINY,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float64,
        **{**MIXED, "num_layers": 8, "moe_layer_freq": FREQ},
        **fields,
    )
    for (rank, vp_stage), layers in expected.items():
        set_pipeline_rank(monkeypatch, rank, stages, virtual)
        yield Stage(config, rank, vp_stage, layers)


@pytest.mark.parametrize("name", PIPELINES)
def test_each_stage_gets_its_layers(name, monkeypatch):
    """A stage with another stage's pattern would build dense layers where experts are saved."""
    for stage in pipeline_stages(name, monkeypatch):
        for get_spec in BLOCK_SPECS.values():
            block = get_spec(stage.config, backend="local", vp_stage=stage.vp_stage)
            kinds = ["MoE" in str(layer.submodules.mlp) for layer in block.layer_specs]
            assert kinds == [bool(FREQ[i]) for i in stage.layers]


def set_pipeline_rank(monkeypatch, rank: int, stages: int, virtual: int | None) -> None:
    """Have Megatron take this process for that pipeline stage."""
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", rank)
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", stages)
    if virtual:
        monkeypatch.setattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", virtual)


class TestByConfig:
    """What ``--spec`` imports for programs that call no spec function, as ``gpt_builder``."""

    def build(self, config, number: int = 1, spec=absorbed_mla_layer_spec, **host):
        return build_module(spec, config=config, layer_number=number, **host)

    def test_is_what_is_imported(self):
        spec = import_module(["specs.absorbed_mla_layer_specs", "absorbed_mla_layer_spec"])
        assert spec is absorbed_mla_layer_spec

    def test_options_travel(self):
        parts = LayerParts("local", OPTIONS)
        spec = spec_by_config(AbsorbedMLATransformerLayer, parts)
        attention = self.build(config_for(TINY), spec=spec).self_attention
        assert attention.options == OPTIONS and attention.kv_layernorm.eps == 1e-3

    @pytest.mark.parametrize("name", PIPELINES)
    def test_layers_know_their_place_in_the_model(self, name, monkeypatch):
        """A layer is given its number in the stage; its kind depends on that in the model."""
        for config, rank, vp_stage, layers in pipeline_stages(name, monkeypatch):
            monkeypatch.setattr("specs.absorbed_mla_layers.get_pg_rank", lambda _, rank=rank: rank)
            for number, index in enumerate(layers, start=1):
                layer = self.build(config, number, vp_stage=vp_stage)
                assert type(layer.mlp) is (MoELayer if FREQ[index] else MLP)

    def test_numbers_of_the_whole_model(self):
        config = config_for(TINY, **MIXED)
        layers = [self.build(config, n, add_layer_offset=False) for n in (1, 2, 3)]
        assert [type(layer.mlp) for layer in layers] == [MLP, MoELayer, MoELayer]

    def test_mtp_is_like_the_last_layer(self):
        assert type(self.build(config_for(TINY, **MIXED), is_mtp_layer=True).mlp) is MoELayer

    def test_pattern_that_is_none(self):
        config = config_for(TINY, num_layers=3)
        config.num_moe_experts, config.moe_layer_freq = 2, [0, 1]
        with refusal("moe_layer_freq", "num_layers=3"):
            self.build(config)


@pytest.mark.parametrize("function", SPECS)
def test_refused_backends(function, monkeypatch):
    """An explicit request never falls back."""
    monkeypatch.setattr(absorbed_mla_parts, "HAVE_TE", False)
    get_spec, config = getattr(layer_specs, function), config_for(TINY)
    with refusal("backend", "None or one of local, transformer_engine", "got 'te'"):
        get_spec(config, backend="te")
    with refusal("backend='transformer_engine'", "not installed", "use backend='local'"):
        get_spec(config, backend="transformer_engine")


@pytest.mark.parametrize(
    "freq", [0, -1, True, 1.5, "2", [0, 1], [0, 1, 1, 1], [0, 1, 2], None], ids=repr
)
def test_refused_patterns(freq):
    config = config_for(TINY, num_layers=3)
    config.num_moe_experts, config.moe_layer_freq = 2, freq
    with refusal("moe_layer_freq", "integer of at least 1", "num_layers=3", f"got {freq!r}"):
        get_absorbed_mla_decoder_block_spec(config, backend="local")
