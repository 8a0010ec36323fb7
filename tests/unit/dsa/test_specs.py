"""Every spec gives sparse attention where the config asks for it, and the model trains.

Layers of multi-token prediction (MTP) have a selection and a loss of their own.
"""

import pytest
import torch
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

import specs.absorbed_mla_layer_specs as layer_specs
from absorbed_mla.dsa.core_attention import SparseCoreAttention
from specs.absorbed_mla_mtp_specs import get_absorbed_mla_mtp_block_spec
from tests.support import needs
from tests.support.cases import config_for
from tests.support.dsa_models import DSA, SHARED, fields
from tests.support.hybrid import hybrid_model
from tests.support.models import call, gpt_model, token_batch


@pytest.fixture(autouse=True)
def _logs(monkeypatch):
    """Megatron's logs have the size of the process's first model."""
    for log in (DSAIndexerLossLoggingHelper, MTPLossLoggingHelper):
        monkeypatch.setattr(log, "tracker", {})


def cores(model) -> list[SparseCoreAttention]:
    return [m for m in model.modules() if isinstance(m, SparseCoreAttention)]


def losses(model) -> list[float]:
    """Of the indexers in one step, in which every parameter gets a gradient."""
    DSAIndexerLossLoggingHelper.tracker.clear()
    call(model.train(), labels=token_batch(3)).mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    return DSAIndexerLossLoggingHelper.tracker["values"].tolist()


def gpt(name: str = "decoder_block", mtp: int | None = None, dtype=torch.float64, **changes):
    changes = fields(**changes, mtp_num_layers=mtp)
    config = config_for(DSA.mla, dtype, **changes)
    block = get_absorbed_mla_mtp_block_spec(config, backend="local") if mtp else None
    spec = getattr(layer_specs, f"get_absorbed_mla_{name}_spec")(config, backend="local")
    return gpt_model(mla=DSA.mla, dtype=dtype, spec=spec, mtp_block_spec=block, **changes)


def hybrid(pattern: str):
    return hybrid_model(pattern, mla=DSA.mla, dtype=torch.float64, **fields())


def of_layers():
    """Megatron adds the final norm: TransformerEngine's, where it is installed, without fp64."""
    return gpt("layer", dtype=torch.float32, num_layers=2)


@pytest.mark.parametrize(
    "build",
    [of_layers, lambda: gpt(num_layers=2), lambda: hybrid("+-+-")],
    ids=["layer", "decoder_block", "hybrid"],
)
def test_models_train(build):
    model = build()
    assert len(cores(model)) == 2
    losses(model)


@needs.no_gpu  # TransformerEngine's layers, where it is installed
def test_spec_without_a_config():
    """``--spec`` of programs that take what they import as the spec itself."""
    assert len(cores(gpt_model(spec=layer_specs.absorbed_mla_layer_spec, **fields()))) == 1


def test_the_decoders_losses_are_without_those_of_mtp():
    alone, both = losses(gpt(num_layers=2)), losses(gpt(mtp=2, num_layers=2))
    assert len(both) == 4 and both[:2] == pytest.approx(alone, rel=1e-6) and min(both) > 0


def test_mtp_in_a_hybrid_model():
    """It numbers its own layers, of which one depth may have two."""
    alone, both = losses(hybrid("+-")), losses(hybrid("+-/+-+"))
    assert both[:2] == pytest.approx(alone, rel=1e-6) and len(both) == 3 and both[2] > 0


def test_every_depth_of_mtp_has_an_indexer():
    """Where layers of the decoder with its number share a selection."""
    model = gpt(mtp=4, **SHARED)
    assert model.decoder.layers[2].self_attention.core_attention.indexer is None
    attentions = [layer.mtp_model_layer.self_attention for layer in model.mtp.layers]
    assert all(attention.core_attention.indexer is not None for attention in attentions)
    assert min(losses(model)[6:]) > 0
