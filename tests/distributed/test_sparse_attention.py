"""The pieces of sparse attention over tensor- and context-parallel ranks, against the oracle.

Output, losses and every gradient in float64. The indexer's parameters are averaged over
tensor-parallel ranks and summed over context-parallel ones.
"""

from __future__ import annotations

import pytest
import torch

from tests import oracle_dsa
from tests.oracle_dsa import OracleLoss
from tests.support import needs, world
from tests.support.dsa import VARIANTS, random_weights
from tests.support.dsa_pieces import evaluate, named
from tests.support.harness import worst_over_ranks
from tests.support.layouts import LAYOUTS, cut_layout
from tests.support.numerics import compare

BOUND = 1e-9
# Tensor- and context-parallel sizes, and whether there is sequence parallelism.
SIZES = {
    2: [(2, 1, False), (2, 1, True), (1, 2, False)],
    4: [(2, 2, False), (2, 2, True), (1, 4, False), (4, 1, True)],
}.get(world.size(), [(1, 1, False)])


@needs.processes(1, 2, 4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("variant", "stage"), [("deepseek", "warm_up"), ("deepseek", "sparse"), ("glm", "sparse")]
)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"tp{s[0]}-cp{s[1]}" + "-sp" * s[2])
def test_against_the_oracle(sizes, variant, layout, stage):
    """Mean in the warm-up, sum in the sparse stage."""
    tp, cp, sequence_parallel = sizes
    dsa, layout = VARIANTS[variant], cut_layout(layout, max(cp, 2))
    weights = random_weights(dsa)
    sparse = stage == "sparse"
    loss = OracleLoss(coefficient=0.7, sparse=sparse, per_token=sparse)
    x = layout.random_rows(dsa.mla.hidden, seed=1).flatten(0, 1)
    output_grad = layout.random_rows(dsa.mla.hidden, seed=2).flatten(0, 1)
    with world.parallel(tp=tp, cp=cp):
        found, chosen = evaluate(
            dsa, weights, x, output_grad, layout, loss, sequence_parallel=sequence_parallel
        )
        least = world.all_reduce(chosen, torch.distributed.ReduceOp.MIN, world.tp_group())
    truth = oracle_dsa.evaluate(dsa, weights, x, output_grad, layout.sequences, loss=loss)
    worst_over_ranks(compare(named(found), named(truth), BOUND)).check()
    assert torch.equal(least, chosen), "tensor-parallel ranks attend over the same keys"
