"""Options of CUDA graphs, as Megatron takes them."""

import pytest
import torch
from megatron.core.transformer.enums import InferenceCudaGraphScope as Scope

from absorbed_mla.serving.scheduler.cuda_graphs import engine_fields, graph_fields, model_fields
from tests.support.cases import TINY, config_for
from tests.support.models import MIXED

# Megatron pads experts for this dispatcher only.
EXPERTS = {**MIXED, "moe_token_dispatcher_type": "alltoall"}


@pytest.mark.parametrize(
    ("fields", "changes", "expected"),
    [
        (graph_fields(None), {}, ("none", Scope.none, False)),
        (graph_fields("block"), {}, ("local", Scope.block, False)),
        (model_fields(False), {}, ("local", Scope.layer, False)),
        (model_fields(True), EXPERTS, ("local", Scope.layer, True)),
    ],
)
def test_of_the_model(fields, changes, expected):
    config = config_for(TINY, torch.float32, **changes, **fields)
    padded = config.moe_pad_experts_for_cuda_graph_inference
    assert (config.cuda_graph_impl, config.inference_cuda_graph_scope, padded) == expected


def test_of_the_engine():
    """Where experts are padded, only steps without a prefill: most of it would be padding."""
    assert engine_fields(None, True) == {}
    assert engine_fields(5, False)["num_cuda_graphs"] == 5
    assert engine_fields(5, False)["use_cuda_graphs_for_non_decode_steps"]
    assert not engine_fields(5, True)["use_cuda_graphs_for_non_decode_steps"]
