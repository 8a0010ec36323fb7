"""Multi-token prediction (MTP) has our attention, on every stage and by Megatron's own builder."""

import contextlib
import typing
import warnings
from dataclasses import replace

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.attention import AbsorbedMLASelfAttention
from absorbed_mla.norm import RMSNorm
from absorbed_mla.standard_mla import get_standard_mla_decoder_block_spec
from absorbed_mla.unsupported import refuse_tied_embeddings_beside_mtp
from specs.absorbed_mla_layer_specs import (
    absorbed_mla_layer_spec,
    get_absorbed_mla_decoder_block_spec,
    get_absorbed_mla_layer_spec,
)
from specs.absorbed_mla_mtp_specs import get_absorbed_mla_mtp_block_spec
from tests.support import world
from tests.support.cases import TINY, config_for
from tests.support.models import MIXED, TOKENS, VOCAB, call, gpt_model, token_batch
from tests.support.refusal import refusal
from tests.unit.specs.test_specs import set_pipeline_rank

OURS = "specs.absorbed_mla_gpt_builder.AbsorbedMLAGPTModelBuilder"
OPTIONS = AbsorbedMLAOptions(form="absorbed", latent_norm_eps=1e-3)


@pytest.fixture(autouse=True)
def _mtp_log(monkeypatch):
    """Megatron's log of MTP losses has the size of the process's first model."""
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})


def inner_layers(model: GPTModel) -> list:
    """The transformer layer inside of each MTP layer."""
    return [layer.mtp_model_layer for layer in model.mtp.layers]


@pytest.mark.parametrize("freq, mlp", [([0, 1, 1], MoELayer), ([1, 1, 0], MLP)])
def test_layers_are_like_the_last(freq, mlp):
    changes = {**MIXED, "moe_layer_freq": freq, "mtp_num_layers": 2}
    config = config_for(TINY, torch.float32, **changes)
    spec = get_absorbed_mla_mtp_block_spec(config, backend="local", options=OPTIONS)
    model = gpt_model(mtp_block_spec=spec, **changes)
    inside = inner_layers(model)
    assert [type(layer.mlp) for layer in inside] == [mlp] * 2
    assert [layer.self_attention.options for layer in inside] == [OPTIONS] * 2
    call(model, labels=token_batch(6)).mean().backward()
    assert not [name for name, p in model.mtp.named_parameters() if p.grad is None]


@pytest.mark.parametrize("layout, refused", [("Etttt|mL", True), ("Ett|ttm|L", False)])
def test_tied_embeddings_in_a_layout(layout, refused):
    config = config_for(
        TINY,
        num_layers=4,
        mtp_num_layers=1,
        pipeline_model_parallel_size=layout.count("|") + 1,
        pipeline_model_parallel_layout=layout,
        pipeline_dtype=torch.float64,
    )
    refuse_tied_embeddings_beside_mtp(config, tied=False)
    with refusal("got 2: ", "untie") if refused else contextlib.nullcontext():
        refuse_tied_embeddings_beside_mtp(config, tied=True)


def test_none_without_mtp():
    assert get_absorbed_mla_mtp_block_spec(config_for(TINY), backend="local") is None


def test_is_what_megatron_makes_of_our_block():
    """But for its norms, which refuse sequence parallelism."""
    config = config_for(TINY, num_layers=2, mtp_num_layers=1)
    block = get_absorbed_mla_decoder_block_spec(config, backend="local")
    [theirs] = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False).layer_specs
    [ours] = get_absorbed_mla_mtp_block_spec(config, backend="local").layer_specs
    names = ("enorm", "hnorm", "layer_norm")
    assert {getattr(ours.submodules, name) for name in names} == {RMSNorm}
    norms = {name: getattr(theirs.submodules, name) for name in names}
    inner = theirs.submodules.mtp_model_layer.submodules
    found = ours.submodules.mtp_model_layer.submodules
    assert replace(found, self_attention=None, mlp=None) == replace(
        inner, self_attention=None, mlp=None
    )
    assert str(found) == str(inner) and ours.module is theirs.module
    outside = replace(ours.submodules, mtp_model_layer=None, **norms)
    assert outside == replace(theirs.submodules, mtp_model_layer=None)


@pytest.mark.parametrize(
    "layout, decoders, mtp", [("Etttt|mL", [4, 0], [0, 1]), ("Ett|ttmL", [2, 2], [0, 1])]
)
def test_each_stage_gets_its_layers(layout, decoders, mtp, monkeypatch):
    """``m`` and ``L`` are MTP and loss; Megatron looks for the last layer of the stage.

    Where there is none it raises, which is why there is a helper;
    tests/distributed/test_built_stages.py trains with it.
    """
    fields = {"num_layers": 4, "mtp_num_layers": 1, "pipeline_dtype": torch.float32}
    stages = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": layout}
    config = config_for(TINY, torch.float32, **fields, **stages)
    for rank in (0, 1):
        set_pipeline_rank(monkeypatch, rank, 2, None)
        block = get_absorbed_mla_decoder_block_spec(config, backend="local")
        assert len(block.layer_specs) == decoders[rank]
        spec = get_absorbed_mla_mtp_block_spec(config, backend="local")
        assert len(spec.layer_specs if spec else []) == mtp[rank]
        with contextlib.nullcontext() if decoders[rank] else pytest.raises(IndexError):
            get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)


@pytest.fixture
def host(monkeypatch):
    """Megatron's builders, which need Python 3.12 for nothing but this decorator."""
    if not hasattr(typing, "override"):
        monkeypatch.setattr(typing, "override", lambda method: method, raising=False)
    return pytest.importorskip("megatron.training.models.gpt")


def build(host, spec, builder: str = OURS, tied: bool = False, **changes) -> GPTModel:
    """By the builder, as ``pretrain`` calls it, with what ``--spec`` imports."""
    fields = {"mtp_num_layers": 1, **MIXED, **changes}
    model_config = host.GPTModelConfig(
        transformer=config_for(TINY, torch.float32, **fields),
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        seq_length=TOKENS,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
    )
    model_config.builder = builder
    made = model_config.get_builder_cls()(model_config)
    return made.build_model(ProcessGroupCollection.use_mpu_process_groups()).to(world.device())


def with_options(config, vp_stage=None):
    """A user's own spec function."""
    return get_absorbed_mla_decoder_block_spec(config, options=OPTIONS, vp_stage=vp_stage)


def put_together(config):
    """A block of Megatron's class."""
    block = with_options(config)
    return TransformerBlockSubmodules(list(block.layer_specs), block.layer_norm)


class TestBuilder:
    @pytest.mark.parametrize(
        "spec",
        [absorbed_mla_layer_spec, get_absorbed_mla_layer_spec, get_absorbed_mla_decoder_block_spec],
        ids=["imported", "layer", "decoder_block"],
    )
    def test_every_spec(self, spec, host):
        model = build(host, spec)
        layers = [*model.decoder.layers, *inner_layers(model)]
        attentions = [type(layer.self_attention) for layer in layers]
        assert attentions == [AbsorbedMLASelfAttention] * 4
        assert [type(layer.mlp) for layer in model.decoder.layers] == [MLP, MoELayer, MoELayer]
        assert isinstance(inner_layers(model)[0].mlp, MoELayer)
        call(model, labels=token_batch(6)).mean().backward()
        assert not [name for name, p in model.named_parameters() if p.grad is None]

    @pytest.mark.parametrize("spec", [with_options, put_together])
    def test_options_of_the_decoder(self, spec, host):
        [layer] = inner_layers(build(host, spec))
        assert layer.self_attention.options == OPTIONS

    def test_without_mtp(self, host):
        model = build(host, get_absorbed_mla_layer_spec, mtp_num_layers=None)
        assert not hasattr(model, "mtp")

    def test_megatron_is_as_before(self, host):
        before = host.mtp_block_spec
        build(host, absorbed_mla_layer_spec)
        assert host.mtp_block_spec is before
        with refusal("normalization='LayerNorm'"):
            build(host, absorbed_mla_layer_spec, normalization="LayerNorm")
        assert host.mtp_block_spec is before

    @pytest.mark.parametrize("spec", [None, get_standard_mla_decoder_block_spec])
    def test_other_attention_is_refused(self, spec, host):
        with refusal("AbsorbedMLAGPTModelBuilder", "specs.absorbed_mla_layer_specs (--spec), got"):
            build(host, spec)

    def test_tied_embeddings_on_the_stage_of_mtp(self, host):
        """Megatron can build it, and asserts when it saves it."""
        stages = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
        with refusal("share_embeddings_and_output_weights=True", "pipeline_model_parallel_size=1"):
            build(host, absorbed_mla_layer_spec, tied=True, **stages)
        assert build(host, absorbed_mla_layer_spec, tied=True)

    def test_megatrons_own_builder_is_warned_of(self, host):
        """It would put standard MLA into the MTP layers; here it cannot, without a GPU's layers."""
        theirs = host.GPTModelConfig.builder
        warned = pytest.warns(UserWarning, match="standard MLA.*AbsorbedMLAGPTModelBuilder")
        with warned, pytest.raises(TypeError):
            build(host, get_absorbed_mla_layer_spec, theirs)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*standard MLA")
            build(host, get_absorbed_mla_layer_spec, theirs, mtp_num_layers=None)
