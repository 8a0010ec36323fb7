"""Grouped experts over ranks: what Megatron's experts give on the same ranks."""

import contextlib

import pytest
import torch
from megatron.core import parallel_state

from absorbed_mla.serving.data_parallel_attention.exchange import TokenExchange
from absorbed_mla.serving.data_parallel_attention.model import shard_layers
from absorbed_mla.serving.experts.experts import GroupedExperts
from absorbed_mla.serving.experts.layer import group_experts
from absorbed_mla.serving.experts.product import grouped_product
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from tests.support import needs, world
from tests.support.cases import TINY, config_for
from tests.support.combinations import few_ranks
from tests.support.experts import ROUTED, pair
from tests.support.models import gpt_model, logits

pytestmark = [few_ranks, needs.no_gpu]

# Experts of a rank are whole, or parts of all of them; tokens are divided, or on all ranks.
LAYOUTS = {
    "parts": (1, False),
    "parts-sp": (1, True),
    "whole-sp": (0, True),
    "whole": (0, False),
}


@pytest.fixture(autouse=True)
def undefined_rows(monkeypatch):
    """Of other ranks' experts: as bad as they may be."""

    def product(x, weights, ends, *tokens, **order):
        found = grouped_product(x, weights, ends, *tokens, **order)
        found[ends[-1] :] = torch.nan
        return found

    monkeypatch.setattr("absorbed_mla.serving.experts.experts.grouped_product", product)


@contextlib.contextmanager
def layout(name: str, tp: int):
    """Sizes for a model's config; 0 groups are as many as ranks."""
    groups, divided = LAYOUTS[name]
    sizes = {"expert_model_parallel_size": groups or world.size()}
    sizes["expert_tensor_parallel_size"] = world.size() // sizes["expert_model_parallel_size"]
    with world.parallel(tp=tp, **sizes):
        sizes["tensor_model_parallel_size"] = tp
        yield {**ROUTED, **sizes, "sequence_parallel": divided and tp > 1}


@pytest.mark.parametrize("name", LAYOUTS if world.size() > 1 else ["parts"])
def test_tensor_parallel(name):
    with layout(name, world.size()) as fields:
        sequential, grouped = pair(**fields)
        assert isinstance(grouped.decoder.layers[1].mlp.experts, GroupedExperts)
        torch.testing.assert_close(logits(grouped), logits(sequential), rtol=1e-4, atol=1e-5)


def divided_pair(**fields):
    """As ``pair``, with data-parallel attention."""
    exchange = TokenExchange(parallel_state.get_expert_tensor_and_model_parallel_group())
    config = config_for(TINY, torch.float32, **fields)
    models = []
    for spread in (lambda spec: spec, group_experts):
        spec = get_absorbed_mla_decoder_block_spec(config, backend=config.transformer_impl)
        models.append(gpt_model(spec=spread(shard_layers(spec, exchange)), **fields).eval())
    models[1].load_state_dict(models[0].state_dict())
    return models, exchange


@needs.processes(2, 4)
@pytest.mark.parametrize("name", ["parts", "whole"])
def test_data_parallel_attention(name):
    """Ranks with numbers of tokens of their own, one of them none."""
    with layout(name, 1) as fields:
        (sequential, grouped), exchange = divided_pair(**fields)
        layers = [model.decoder.layers[2].mlp for model in (sequential, grouped)]
        assert isinstance(layers[1].experts, GroupedExperts)
        count = 5 * world.rank()
        exchange.tokens = exchange.counts(count)
        generator = torch.Generator().manual_seed(world.rank())
        x = torch.randn(count, 1, sequential.config.hidden_size, generator=generator)
        with torch.no_grad():
            expected, found = (layer(x)[0] for layer in layers)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert found.shape == x.shape
