"""Every spec gives sparse attention where the config asks for it, and the model trains."""

from __future__ import annotations

import pytest
import torch

import specs.absorbed_mla_layer_specs as layer_specs
from absorbed_mla.dsa.core_attention import SparseCoreAttention
from specs.absorbed_mla_mtp_specs import get_absorbed_mla_mtp_block_spec
from tests.support import needs
from tests.support.cases import TINY, config_for
from tests.support.dsa import TINY_DSA, dsa_fields
from tests.support.hybrid import hybrid_model
from tests.support.models import TOKENS, gpt_model, token_batch

FIELDS = {**dsa_fields(TINY_DSA), "dsa_indexer_loss_coeff": 0.5}


def cores(model) -> list[SparseCoreAttention]:
    return [m for m in model.modules() if isinstance(m, SparseCoreAttention)]


def require_training(model) -> None:
    tokens = token_batch()
    positions = torch.arange(TOKENS, device=tokens.device).expand_as(tokens)
    model(tokens, positions, None, labels=tokens.roll(-1, 1)).mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("name", ["layer", "decoder_block"])
def test_gpt_model(name):
    changes = {**FIELDS, "num_layers": 2}
    config = config_for(TINY, torch.float32, **changes)
    spec = getattr(layer_specs, f"get_absorbed_mla_{name}_spec")(config, backend="local")
    model = gpt_model(spec=spec, **changes)
    assert len(cores(model)) == 2
    require_training(model)


@needs.no_gpu  # TransformerEngine's layers, where it is installed
def test_spec_without_a_config():
    """``--spec`` of programs that take what they import as the spec itself."""
    model = gpt_model(spec=layer_specs.absorbed_mla_layer_spec, **FIELDS)
    assert len(cores(model)) == 1


def test_hybrid_model():
    model = hybrid_model("+-+-", **FIELDS)
    assert len(cores(model)) == 2
    require_training(model)


def test_mtp():
    changes = {**FIELDS, "num_layers": 2, "mtp_num_layers": 1}
    config = config_for(TINY, torch.float32, **changes)
    spec = layer_specs.get_absorbed_mla_decoder_block_spec(config, backend="local")
    mtp = get_absorbed_mla_mtp_block_spec(config, backend="local")
    model = gpt_model(spec=spec, mtp_block_spec=mtp, **changes)
    assert len(cores(model)) == 3
    require_training(model)
