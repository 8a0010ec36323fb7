"""Training of nothing but the indexers, also where Megatron recomputes whole layers."""

import pytest
import torch
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
from torch import Tensor, nn

from absorbed_mla.dsa.warm_up import INDEXER, require_embedding_gradient, train_only_indexer
from tests.support.dsa_models import dsa_model
from tests.support.models import MIXED, call, token_batch
from tests.support.numerics import compare
from tests.support.refusal import refusal

BLOCK = {"recompute_method": "block", "recompute_num_layers": 1}
RECOMPUTED = [
    BLOCK,
    {"recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_method": "uniform", "recompute_num_layers": 2},
]


def model(**recompute) -> nn.Module:
    if recompute:
        recompute["recompute_granularity"] = "full"
    return dsa_model(num_layers=2, **recompute).train()


def freeze(gpt: nn.Module) -> None:
    """As a program does by itself."""
    for name, parameter in gpt.named_parameters():
        parameter.requires_grad_(INDEXER in name)


def gradients(gpt: nn.Module) -> dict[str, Tensor]:
    """By name, and the logged losses."""
    DSAIndexerLossLoggingHelper.tracker.clear()
    call(gpt, labels=token_batch(3)).mean().backward()
    found = {name: p.grad for name, p in gpt.named_parameters() if p.grad is not None}
    return {**found, "logged": DSAIndexerLossLoggingHelper.tracker["values"].clone()}


@pytest.mark.parametrize("recompute", RECOMPUTED)
def test_recomputed_indexers_learn_alike(recompute):
    whole, again = model(), model(**recompute)
    for gpt in (whole, again):
        train_only_indexer(gpt)
    expected = gradients(whole)
    compare(gradients(again), expected, 1e-12).check()
    assert all(INDEXER in name for name in expected.keys() - {"logged"})
    assert expected["logged"].min() > 0
    with torch.no_grad():
        call(again)


@pytest.mark.parametrize("recompute", RECOMPUTED)
def test_a_program_that_freezes_by_itself(recompute):
    """It would train nothing, or end in an error of PyTorch's."""
    gpt = model(**recompute)
    freeze(gpt)
    with refusal("indexer of layer 1", "recomputation", "train_only_indexer"):
        call(gpt, labels=token_batch(3))
    call(gpt.eval())
    require_embedding_gradient(gpt)
    assert gradients(gpt.train())["logged"].min() > 0


def test_forwards_without_gradients_are_no_mistake():
    """Of a model that is trained whole."""
    gpt = model(**BLOCK)
    with torch.no_grad():
        call(gpt)
    assert gradients(gpt)["logged"].min() > 0


def test_biases_of_experts_are_frozen():
    fields = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    gpt = dsa_model(torch.float32, **MIXED, **fields)
    train_only_indexer(gpt)
    frozen = [m.frozen_expert_bias for m in gpt.modules() if hasattr(m, "frozen_expert_bias")]
    assert frozen == [True, True]
