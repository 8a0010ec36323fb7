"""An indexer's loss in Megatron's backward and in its log; training without a loss."""

import pytest
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
)
from torch import Tensor, nn

from absorbed_mla.dsa.aux_loss import report_loss
from absorbed_mla.dsa.warm_up import INDEXER
from tests.support import world
from tests.support.dsa_models import dsa_model
from tests.support.models import call, token_batch
from tests.support.numerics import compare

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def test_backward_and_log():
    """The output's gradient is its own, the loss gets the scale that the schedule has set."""
    x = torch.randn(3, device=world.device(), requires_grad=True)
    parameter = torch.ones((), device=world.device(), requires_grad=True)
    DSAIndexerLossAutoScaler.set_loss_scale(torch.tensor(3.0, device=world.device()))
    where = {"num_layers": 4, "cp_group": world.cp_group()}
    output = report_loss(2 * x, 5 * parameter, layer_number=2, **where)
    output = report_loss(output, 7 * parameter, layer_number=3, **where)
    output.sum().backward()
    assert x.grad.tolist() == [2.0] * 3
    assert parameter.grad.item() == 3 * (5 + 7)

    logged = {}
    DSAIndexerLossLoggingHelper.track_indexer_metrics(0.5, 1, None, total_loss_dict=logged)
    assert logged["indexer loss"].item() == 0.5 * (5 + 7) / 4


def test_no_loss_without_an_output_gradient():
    """A frozen model still has to hand a gradient to its output: the warm-up's."""
    parameter = torch.ones((), device=world.device(), requires_grad=True)
    frozen = torch.randn(3, device=world.device())
    output = report_loss(frozen, 5 * parameter, layer_number=1, num_layers=1, cp_group=None)
    assert output.requires_grad
    output.sum().backward()
    assert parameter.grad.item() == 5


def ddp(model: nn.Module, overlap: bool) -> DistributedDataParallel:
    settings = DistributedDataParallelConfig(overlap_grad_reduce=overlap)
    return DistributedDataParallel(model.config, settings, model)


def backward(model: nn.Module, step: int) -> None:
    call(model, labels=token_batch(step)).mean().backward()


def steps(coefficient: float | None, overlap: bool, **fields) -> list[dict[str, Tensor]]:
    model = dsa_model(num_layers=2, dsa_indexer_loss_coeff=coefficient, **fields).train()
    wrapped, found = ddp(model, overlap), []
    for step in range(3):
        wrapped.zero_grad_buffer()
        backward(wrapped, step)
        finalize_model_grads([wrapped])
        found.append({name: p.main_grad.clone() for name, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("fields", [{}, FULL], ids=["whole", "recomputed"])
@pytest.mark.parametrize("coefficient", [0.0, None, 0.5])
def test_overlapped_reduction(coefficient, fields):
    """It counts on gradients of the same parameters in every step."""
    found, expected = (steps(coefficient, overlap, **fields) for overlap in (True, False))
    for ours, theirs in zip(found, expected):
        compare(ours, theirs, 1e-12).check()
        of_indexers = [ours[name].abs().max() > 0 for name in ours if INDEXER in name]
        assert of_indexers and all(x == bool(coefficient) for x in of_indexers)


def test_elsewhere_there_is_no_gradient():
    """An optimizer of PyTorch's would apply its weight decay."""
    model = dsa_model(num_layers=1, dsa_indexer_loss_coeff=None).train()
    backward(model, 0)
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert without == {name for name, _ in model.named_parameters() if INDEXER in name}


def test_a_frozen_indexer_and_an_evaluation():
    model = dsa_model(num_layers=1, dsa_indexer_loss_coeff=0.0).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(INDEXER not in name)
    wrapped = ddp(model, overlap=True)
    for step in range(2):
        wrapped.zero_grad_buffer()
        backward(wrapped, step)
        finalize_model_grads([wrapped])
        with torch.no_grad():
            call(wrapped.eval())
        wrapped.train()
