"""Gradients of whole models in Megatron's pipeline schedules, over experts' ranks and with MTP.

The judge is the same model in one process, with the same microbatches; the layers themselves are
compared with the oracle elsewhere. If a test fails, a model trains differently when it is cut.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from absorbed_mla.attention import AbsorbedMLASelfAttention
from tests.support import needs, world
from tests.support.numerics import relative_error
from tests.support.pipeline import (
    LAYOUTS,
    Model,
    load,
    microbatches,
    train_step,
    whole_weights,
)

form = pytest.mark.parametrize("form", ["absorbed", "expanded"])
layout = pytest.mark.parametrize("layout", LAYOUTS)
experts = pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
PIPELINES = {
    "pp": {"pipeline_model_parallel_size": 2},
    "pp-vpp": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
}
# The goal for sums in another order, in fp32.
TOLERANCE = 2e-6


def alone(model: Model, layout: str, seeds: range, **sizes):
    """Losses and gradients of the model that is not cut into stages; every replica has all data."""
    with world.parallel(**sizes):
        chunks = model.build()
        load(chunks, whole_weights(model))
        return train_step(chunks, LAYOUTS[layout], microbatches(LAYOUTS[layout], seeds))


def cut(model: Model, layout: str, seeds: range, source: Model | None = None, **sizes):
    """Losses and gradients in a parallel layout, with the weights of ``source``."""
    with world.parallel(tp=sizes.get("tp", 1)):
        whole = whole_weights(source or model)
    with world.parallel(**sizes):
        chunks = model.build()
        load(chunks, whole)
        replicas = parallel_state.get_data_parallel_world_size()
        own = seeds[parallel_state.get_data_parallel_rank() :: replicas]
        return train_step(chunks, LAYOUTS[layout], microbatches(LAYOUTS[layout], own))


def all_names(gradients) -> set[str]:
    """Names of all ranks."""
    found = [None] * world.size()
    dist.all_gather_object(found, set(gradients))
    return set().union(*found)


def require_equal(found, expected) -> None:
    """To the bit; between them, the ranks have all weights of the model."""
    assert all_names(found) == set(expected)
    for name, gradient in found.items():
        assert gradient.abs().sum() > 0, name
        assert torch.equal(gradient, expected[name]), name


def require_close(found, expected) -> None:
    assert all_names(found) == set(expected)
    for name, gradient in found.items():
        error = relative_error(gradient, expected[name])
        assert error < TOLERANCE, f"{name}: relative error {error:.1e}"


@needs.processes(2)
@pytest.mark.parametrize("pipeline", PIPELINES)
@experts
@form
@layout
def test_stages(pipeline, experts, form, layout):
    model = Model(form=form, experts=experts)
    losses, gradients = cut(model, layout, range(4), **PIPELINES[pipeline])
    expected_losses, expected = alone(model, layout, range(4))
    if losses:
        assert losses == expected_losses
    require_equal(gradients, expected)


@needs.processes(2)
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@form
@layout
def test_ranks_of_experts(dispatcher, form, layout):
    """Each rank has half of the experts, and half of the microbatches."""
    fields = (("moe_token_dispatcher_type", dispatcher),)
    model = Model(form=form, experts=True, fields=fields)
    _, gradients = cut(model, layout, range(4), expert_model_parallel_size=2)
    _, expected = alone(model, layout, range(4))
    require_close(gradients, expected)


@needs.processes(2)
@pytest.mark.parametrize("pipeline", PIPELINES)
@experts
@form
def test_multi_token_prediction(pipeline, experts, form):
    """The last stage has the MTP layers, and a second embedding, whose gradients are summed."""
    model = Model(form=form, experts=experts, mtp_layers=2)
    _, gradients = cut(model, "sbhd", range(4), **PIPELINES[pipeline])
    _, expected = alone(model, "sbhd", range(4))
    require_close(gradients, expected)


@needs.processes(4)
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("form, layout", [("absorbed", "thd"), ("expanded", "sbhd")])
def test_stages_with_tensor_parallelism(pipeline, form, layout):
    fields = (("sequence_parallel", True),)
    model = Model(form=form, experts=True, fields=fields)
    _, gradients = cut(model, layout, range(4), tp=2, **PIPELINES[pipeline])
    _, expected = alone(model, layout, range(4), tp=2)
    require_equal(gradients, expected)


@needs.processes(4)
@pytest.mark.parametrize("pipeline", PIPELINES)
@form
def test_stages_with_ranks_of_experts(pipeline, form):
    model = Model(form=form, experts=True, mtp_layers=1)
    _, gradients = cut(model, "sbhd", range(4), expert_model_parallel_size=2, **PIPELINES[pipeline])
    _, expected = alone(model, "sbhd", range(4))
    require_close(gradients, expected)


@needs.processes(2)
@pytest.mark.parametrize("delay", [False, True], ids=["overlapped", "delayed"])
@form
@layout
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
        _, gradients = cut(pieces, layout, range(4), plain, expert_model_parallel_size=2)
    assert bool(asked.call_count) == delay
    _, expected = cut(plain, layout, range(4), expert_model_parallel_size=2)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name
