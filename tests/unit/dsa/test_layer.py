"""The pieces of sparse attention put together, against the oracle: every gradient, in float64."""

from __future__ import annotations

import pytest
import torch

from tests import oracle_dsa
from tests.oracle_dsa import OracleLoss
from tests.support.dsa import VARIANTS, random_weights
from tests.support.dsa_pieces import evaluate, named
from tests.support.layouts import LAYOUTS, grid_layout
from tests.support.numerics import compare

BOUND = 1e-9


@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "sum"])
@pytest.mark.parametrize("sparse", [False, True], ids=["warm_up", "sparse"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_against_the_oracle(variant, layout, sparse, per_token):
    """Three heads of the indexer: many keys tie at a score of 0."""
    dsa, layout = VARIANTS[variant], grid_layout(layout, False)
    weights = random_weights(dsa)
    loss = OracleLoss(coefficient=0.7, sparse=sparse, per_token=per_token)
    x = layout.random_rows(dsa.mla.hidden, seed=1).flatten(0, 1)
    output_grad = layout.random_rows(dsa.mla.hidden, seed=2).flatten(0, 1)
    found, _ = evaluate(dsa, weights, x, output_grad, layout, loss)
    truth = oracle_dsa.evaluate(dsa, weights, x, output_grad, layout.sequences, loss=loss)
    compare(named(found), named(truth), BOUND).check(variant)


def test_top_k_above_the_sequence_is_dense():
    dsa, layout = VARIANTS["topk_above"], grid_layout("thd_padded", False)
    weights = random_weights(dsa)
    x = layout.random_rows(dsa.mla.hidden, seed=1).flatten(0, 1)
    ones = torch.ones_like(x)
    found, _ = evaluate(dsa, weights, x, ones, layout, OracleLoss())
    truth = oracle_dsa.evaluate(
        dsa, weights, x, ones, layout.sequences, loss=OracleLoss(sparse=False), dense=True
    )
    compare(named(found), named(truth), BOUND).check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_selection_of_another_layer(layout):
    """Shared, or replayed: attention and sparse loss over it, whatever this layer would choose."""
    dsa, layout = VARIANTS["deepseek"], grid_layout(layout, False)
    weights, others = random_weights(dsa), random_weights(dsa, seed=5)
    x = layout.random_rows(dsa.mla.hidden, seed=1).flatten(0, 1)
    ones = torch.ones_like(x)
    _, chosen = evaluate(dsa, others, x, ones, layout, OracleLoss())
    found, _ = evaluate(dsa, weights, x, ones, layout, OracleLoss(), chosen)
    theirs = oracle_dsa.forward(dsa, others, x, layout.sequences).chosen
    truth = oracle_dsa.evaluate(
        dsa, weights, x, ones, layout.sequences, loss=OracleLoss(), chosen=theirs
    )
    compare(named(found), named(truth), BOUND).check()
    own = oracle_dsa.forward(dsa, weights, x, layout.sequences).chosen
    assert any(not torch.equal(a, b) for a, b in zip(own, theirs, strict=True))
