"""The layer in bf16, with local layers and with TransformerEngine's, close to the oracle.

Nothing is chosen: in bf16 other keys would be.
"""

from __future__ import annotations

import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from tests.oracle_dsa import OracleLoss
from tests.support import needs
from tests.support.dsa import VARIANTS, random_weights
from tests.support.dsa_layer import build, evaluate, named, truth
from tests.support.harness import Setup
from tests.support.layouts import grid_layout
from tests.support.numerics import compare

DSA = VARIANTS["topk_above"]
LOSS = OracleLoss(coefficient=1.0, sparse=False)
TE = needs.gpu_with("TransformerEngine", None if HAVE_TE else "it is not installed")


@pytest.mark.parametrize("backend", ["local", pytest.param("transformer_engine", marks=TE)])
def test_bf16(backend):
    layout, weights = grid_layout("thd", False), random_weights(DSA)
    setup = Setup(form="auto", dtype=torch.bfloat16, backend=backend)
    attention = build(DSA, setup, weights, LOSS)
    assert attention.core_attention.indexer.linear_wk.weight.dtype == torch.bfloat16
    found = named(evaluate(attention, DSA, setup, layout))
    expected = named(truth(attention, DSA, weights, layout, LOSS, dense=True))
    compare({n: t.double() for n, t in found.items()}, expected, 0.05).check()
