"""Gradients of whole models in Megatron's pipeline schedules, over experts' ranks and with MTP.

The judge is the same model in one process, with the same microbatches; the layers themselves are
compared with the oracle elsewhere. If a test fails, a model trains differently when it is cut.
"""

from unittest import mock

import torch
from megatron.core import parallel_state

from absorbed_mla.attention import AbsorbedMLASelfAttention
from tests.distributed.whole import of_all_ranks
from tests.support import needs, world
from tests.support.combinations import grid
from tests.support.numerics import relative_error
from tests.support.pipeline import (
    LAYOUTS,
    Model,
    load,
    microbatches,
    train_step,
    whole_weights,
)

FORM = ("absorbed", "expanded")
EXPERTS = {"dense": False, "experts": True}
PIPELINES = {
    "pp": {"pipeline_model_parallel_size": 2},
    "pp-vpp": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
}
# Of the microbatches.
SEEDS = range(4)
# The goal for sums in another order, in fp32.
TOLERANCE = 2e-6


def alone(model: Model, layout: str, **sizes):
    """Losses and gradients of the model that is not cut into stages; every replica has all data."""
    with world.parallel(**sizes):
        chunks = model.build()
        load(chunks, whole_weights(model))
        return train_step(chunks, LAYOUTS[layout], microbatches(LAYOUTS[layout], SEEDS))


def cut(model: Model, layout: str, source: Model | None = None, **sizes):
    """Losses and gradients in a parallel layout, with the weights of ``source``."""
    with world.parallel(tp=sizes.get("tp", 1)):
        whole = whole_weights(source or model)
    with world.parallel(**sizes):
        chunks = model.build()
        load(chunks, whole)
        replicas = parallel_state.get_data_parallel_world_size()
        own = SEEDS[parallel_state.get_data_parallel_rank() :: replicas]
        return train_step(chunks, LAYOUTS[layout], microbatches(LAYOUTS[layout], own))


def check(model: Model, layout: str = "sbhd", *, exact: bool = False, tp: int = 1, **sizes):
    """Gradients in a parallel layout are those of the whole model; to the bit if ``exact``.

    Between them, the ranks have all weights of the model.
    """
    losses, gradients = cut(model, layout, tp=tp, **sizes)
    expected_losses, expected = alone(model, layout, tp=tp)
    assert not (exact and losses) or losses == expected_losses
    assert set().union(*of_all_ranks(set(gradients))) == set(expected)
    for name, gradient in gradients.items():
        assert gradient.abs().sum() > 0, name
        if exact:
            assert torch.equal(gradient, expected[name]), name
        error = relative_error(gradient, expected[name])
        assert error < TOLERANCE, f"{name}: relative error {error:.1e}"


@needs.processes(2)
@grid(2, {"pipeline": PIPELINES, "experts": EXPERTS, "form": FORM, "layout": [*LAYOUTS]})
def test_stages(pipeline, experts, form, layout):
    check(Model(form=form, experts=experts), layout, exact=True, **pipeline)


@needs.processes(2)
@grid(1, {"dispatcher": ("allgather", "alltoall"), "form": FORM, "layout": [*LAYOUTS]})
def test_ranks_of_experts(dispatcher, form, layout):
    """Each rank has half of the experts, and half of the microbatches."""
    fields = (("moe_token_dispatcher_type", dispatcher),)
    check(Model(form=form, experts=True, fields=fields), layout, expert_model_parallel_size=2)


@needs.processes(2)
@grid(1, {"pipeline": PIPELINES, "experts": EXPERTS, "form": FORM})
def test_multi_token_prediction(pipeline, experts, form):
    """The last stage has the MTP layers, and a second embedding, whose gradients are summed."""
    check(Model(form=form, experts=experts, mtp_layers=2), **pipeline)


@needs.processes(4)
@grid(2, {"pipeline": PIPELINES, "form": FORM, "layout": [*LAYOUTS]})
def test_stages_with_tensor_parallelism(pipeline, form, layout):
    fields = (("sequence_parallel", True),)
    check(Model(form=form, experts=True, fields=fields), layout, exact=True, tp=2, **pipeline)


@needs.processes(4)
@grid(2, {"pipeline": PIPELINES, "form": FORM})
def test_stages_with_ranks_of_experts(pipeline, form):
    model = Model(form=form, experts=True, mtp_layers=1)
    check(model, expert_model_parallel_size=2, **pipeline)


@needs.processes(2)
@grid(1, {"delay": {"overlapped": False, "delayed": True}, "form": FORM, "layout": [*LAYOUTS]})
def test_overlapped_experts(delay, form, layout):
    """Layers in pieces, with weight gradients after the others: equal to layers in one."""
    options = {"moe_token_dispatcher_type": "alltoall"}
    overlap = {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": delay}
    plain, pieces = (
        Model(form=form, experts=True, dtype=torch.bfloat16, fields=tuple(fields.items()))
        for fields in (options, options | overlap)
    )
    asked = mock.Mock()
    with mock.patch.object(AbsorbedMLASelfAttention, "backward_dw", asked):
        _, gradients = cut(pieces, layout, plain, expert_model_parallel_size=2)
    assert bool(asked.call_count) == delay
    _, expected = cut(plain, layout, expert_model_parallel_size=2)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name
