"""Training a sparse model whose indexers have no loss, as Megatron's default is."""

from __future__ import annotations

import pytest
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from torch import Tensor, nn

from absorbed_mla.dsa.warm_up import INDEXER
from tests.support.dsa_models import dsa_model
from tests.support.models import call, token_batch
from tests.support.numerics import compare

FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def backward(model: nn.Module, step: int) -> None:
    call(model, labels=token_batch(step)).mean().backward()


def steps(coefficient: float | None, overlap: bool, **fields) -> list[dict[str, Tensor]]:
    """The gradients of three steps."""
    model = dsa_model(num_layers=2, dsa_indexer_loss_coeff=coefficient, **fields).train()
    settings = DistributedDataParallelConfig(overlap_grad_reduce=overlap)
    wrapped = DistributedDataParallel(model.config, settings, model)
    found = []
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
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(overlap_grad_reduce=True), model
    )
    for step in range(2):
        wrapped.zero_grad_buffer()
        backward(wrapped, step)
        finalize_model_grads([wrapped])
        with torch.no_grad():
            call(wrapped.eval())
        wrapped.train()
