"""Models with sparse attention in Megatron's schedules; one rank's model is the judge."""

from dataclasses import replace

import pytest
import torch

from tests.distributed.test_pipeline import PIPELINES
from tests.distributed.test_pipeline import check as check_cut
from tests.oracle_dsa import OracleLoss
from tests.support import needs, world
from tests.support.combinations import grid
from tests.support.dsa import TINY_DSA, dsa_fields
from tests.support.dsa_layer import check
from tests.support.harness import Setup
from tests.support.layouts import cut_layout
from tests.support.pipeline import (
    LAYOUTS,
    Model,
    load,
    microbatches,
    train_step,
    whole_weights,
)

# Layers 2 and 4 share what layers 1 and 3 choose.
SHARED = {
    **dsa_fields(TINY_DSA),
    "dsa_indexer_topk_freq": 2,
    "dsa_indexer_loss_coeff": 0.5,
    "dsa_indexer_use_sparse_loss": True,
}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}

RECOMPUTE = {"": {}, "recompute": FULL}


def model_with(**changes) -> Model:
    return Model(dtype=torch.float64, fields=tuple({**SHARED, **changes}.items()))


@needs.processes(2)
@grid(1, {"recompute": RECOMPUTE, "layout": ("sbhd", "thd")})
def test_pipeline(recompute, layout):
    """Four microbatches, two of them in flight on the first stage; gradients of indexers, too."""
    check_cut(model_with(**recompute), layout, exact=True, **PIPELINES["pp"])


@needs.processes(2)
@grid(1, {"pipeline": [*PIPELINES], "recompute": RECOMPUTE})
def test_stages_that_begin_with_a_shared_layer(pipeline, recompute):
    """Layers 2, 3 and 4 share what layer 1 chooses; virtual stages pass it on and back again."""
    model = model_with(dsa_indexer_topk_freq=4, **recompute)
    check_cut(model, exact=True, **PIPELINES[pipeline])


@needs.processes(2)
@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_ranks_of_experts(layout):
    """Each rank has half of the experts, and half of the microbatches."""
    model = replace(model_with(), experts=True)
    check_cut(model, layout, expert_model_parallel_size=2)


@needs.processes(4)
def test_shared_layers_with_tensor_parallelism():
    """A rank passes on what it has chosen to the rank with the same heads."""
    model = model_with(dsa_indexer_topk_freq=4, sequence_parallel=True)
    check_cut(model, exact=True, tp=2, **PIPELINES["pp"])


@needs.processes(2, 4)
def test_dynamic_context_parallelism():
    """The call brings its ranks, which are those of the exchange, the loss and the log."""
    size = world.size()
    with world.parallel(hybrid_context_parallel=True):
        layout = cut_layout("thd_padded", size)
        call = {"cp": {"local_cp_size": size}}
        loss = OracleLoss(coefficient=0.7)
        check(TINY_DSA, Setup(form="auto"), layout, loss, call=call)


@needs.processes(2)
def test_finalized_gradients():
    """Megatron averages the indexers' gradients, of all tokens or of each rank's own, over TP."""
    layout = LAYOUTS["sbhd"]
    found = []
    for sequence_parallel in (False, True):
        model = model_with(sequence_parallel=sequence_parallel)
        with world.parallel(tp=2):
            chunks = model.build()
            load(chunks, whole_weights(model_with()))
            _, gradients = train_step(chunks, layout, microbatches(layout, range(2)))
            found.append({n: g for n, g in gradients.items() if "indexer" in n})
            for name, gradient in found[-1].items():
                highest = world.all_reduce(gradient, torch.distributed.ReduceOp.MAX)
                assert torch.equal(highest, gradient), f"ranks differ: {name}"
    assert len(found[0]) == 10
    for name, gradient in found[0].items():
        assert gradient.abs().sum() > 0, name
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-9, atol=1e-12, msg=name)
