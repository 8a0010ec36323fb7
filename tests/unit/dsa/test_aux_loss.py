"""An indexer's loss in Megatron's backward and in its log."""

from __future__ import annotations

import torch
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
)

from absorbed_mla.dsa.aux_loss import report_loss
from tests.support import world


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
