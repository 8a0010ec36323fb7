"""What the specs ask of TransformerEngine, on machines that do not have it.

Its layers are not run here; their names stand in for them. Wrong parts in a slot are found where
TransformerEngine is installed only after a long build.
"""

import importlib
import sys

import pytest
from megatron.core.extensions import transformer_engine as te_extension
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.transformer.identity_op import IdentityOp

import specs.absorbed_mla_layer_specs as layer_specs
import specs.absorbed_mla_parts as absorbed_mla_parts
from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.norm import RMSNorm
from tests.support.cases import TINY, config_for
from tests.support.models import MIXED


class RecordingLinear:
    """In the place of TELinear: remembers how it was built."""

    def __init__(self, input_size, output_size, **kwargs) -> None:
        self.sizes, self.kwargs = (input_size, output_size), kwargs


@pytest.fixture
def installed(monkeypatch):
    """As if TransformerEngine were installed, as far as specs look at it."""
    monkeypatch.setattr(absorbed_mla_parts, "HAVE_TE", True)
    monkeypatch.setattr(te_extension, "TELinear", RecordingLinear)
    monkeypatch.delitem(sys.modules, "absorbed_mla.te_linear", raising=False)
    yield importlib.import_module("absorbed_mla.te_linear").TEDuplicatedLinear
    sys.modules.pop("absorbed_mla.te_linear")  # it holds the stand-in


def attention_parts(**options):
    config, options = config_for(TINY), AbsorbedMLAOptions(**options)
    spec = layer_specs.get_absorbed_mla_layer_spec(config, options=options)
    return spec.submodules.self_attention.submodules


def test_is_what_none_picks(installed):
    column = TESpecProvider().column_parallel_linear()
    parts = attention_parts()
    assert parts.linear_q_up_proj is parts.linear_q_proj is column
    assert parts.linear_proj is TESpecProvider().row_parallel_linear()
    config = config_for(TINY)
    local = layer_specs.get_absorbed_mla_layer_spec(config, backend="local").submodules
    assert local.self_attention.submodules.linear_q_proj is not column


@pytest.mark.parametrize("kind", ["duplicated", "column_parallel"])
def test_down_projections(installed, kind):
    parts = attention_parts(down_projection=kind)
    expected = installed if kind == "duplicated" else TESpecProvider().column_parallel_linear()
    assert parts.linear_q_down_proj is parts.linear_kv_down_proj is expected


def test_duplicated_linear(installed):
    """It takes the arguments of any linear layer; two of them mean something else to TELinear."""
    layer = installed(4, 6, config="config", tp_group="group", gather_output=False, bias=False)
    assert layer.sizes == (4, 6)
    assert layer.kwargs == {
        "parallel_mode": "duplicated",
        "skip_weight_param_allocation": False,
        "tp_group": None,
        "config": "config",
        "bias": False,
    }


def test_norms(installed):
    """A dense MLP has its norm fused into its first layer; a second one would act on top of it."""
    config = config_for(TINY, **MIXED)
    block = layer_specs.get_absorbed_mla_decoder_block_spec(config)
    norm = TESpecProvider().layer_norm(rms_norm=True)
    dense, *mixtures = (layer.submodules for layer in block.layer_specs)
    assert dense.pre_mlp_layernorm is IdentityOp
    assert [mixture.pre_mlp_layernorm for mixture in mixtures] == [norm, norm]
    assert dense.input_layernorm is block.layer_norm is norm
    parts = dense.self_attention.submodules
    assert parts.q_layernorm is parts.kv_layernorm is RMSNorm
