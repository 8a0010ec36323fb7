"""Layers of multi-token prediction (MTP) with sparse attention: their selection and their loss."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossLoggingHelper,
)
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from specs.absorbed_mla_mtp_specs import get_absorbed_mla_mtp_block_spec
from tests.support.cases import config_for
from tests.support.dsa_models import DSA, SHARED, fields
from tests.support.hybrid import hybrid_model
from tests.support.models import call, gpt_model, token_batch


@pytest.fixture(autouse=True)
def _logs(monkeypatch):
    """Megatron's logs have the size of the process's first model."""
    for log in (DSAIndexerLossLoggingHelper, MTPLossLoggingHelper):
        monkeypatch.setattr(log, "tracker", {})


def gpt(mtp: int | None, **changes):
    changes = fields(**changes, mtp_num_layers=mtp)
    config = config_for(DSA.mla, torch.float64, **changes)
    block = get_absorbed_mla_mtp_block_spec(config, backend="local") if mtp else None
    spec = get_absorbed_mla_decoder_block_spec(config, backend="local")
    return gpt_model(mla=DSA.mla, dtype=torch.float64, spec=spec, mtp_block_spec=block, **changes)


def hybrid(pattern: str):
    return hybrid_model(pattern, mla=DSA.mla, dtype=torch.float64, **fields())


def logged(model) -> list[float]:
    DSAIndexerLossLoggingHelper.tracker.clear()
    call(model.train(), labels=token_batch(3)).mean().backward()
    return DSAIndexerLossLoggingHelper.tracker["values"].tolist()


def test_the_decoders_losses_are_without_those_of_mtp():
    alone, both = logged(gpt(None, num_layers=2)), logged(gpt(2, num_layers=2))
    assert len(both) == 4 and both[:2] == pytest.approx(alone, rel=1e-6) and min(both) > 0


def test_in_a_hybrid_model():
    """Whose MTP numbers its own layers, of which one depth may have two."""
    alone, both = logged(hybrid("+-")), logged(hybrid("+-/+-+"))
    assert both[:2] == pytest.approx(alone, rel=1e-6) and len(both) == 3 and both[2] > 0


def test_every_depth_has_an_indexer():
    """Where layers of the decoder with its number share a selection."""
    model = gpt(4, **SHARED)
    assert model.decoder.layers[2].self_attention.core_attention.indexer is None
    attentions = [layer.mtp_model_layer.self_attention for layer in model.mtp.layers]
    assert all(attention.core_attention.indexer is not None for attention in attentions)
    assert min(logged(model)[6:]) > 0
