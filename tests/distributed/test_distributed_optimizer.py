"""Megatron's distributed optimizer: each rank keeps the state of a share of the parameters.

If it fails, a mark or the memory of a parameter is not what Megatron's buffers expect.
"""

from __future__ import annotations

import pytest
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

from tests.support import needs, world
from tests.support.models import MIXED, call, gpt_model, token_batch

pytestmark = needs.processes(2)

STEPS = 5
DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAPPED = {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True}


def train(dtype: torch.dtype, **options):
    """Losses and weights; every rank has batches of its own."""
    destroy_moe_metrics_tracker()
    model = gpt_model(dtype=dtype, **MIXED)
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **options)
    wrapped = DistributedDataParallel(model.config, settings, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            # The norm of shards is summed in another order.
            clip_grad=0.0,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            **{k: v for k, v in options.items() if k != "overlap_grad_reduce"},
        ),
        [wrapped],
    )
    losses = []
    for step in range(STEPS):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        batch = token_batch(2 * step + world.rank())
        loss = call(wrapped, labels=batch).float().mean()
        loss.backward()
        finalize_model_grads([wrapped])
        updated, *_ = optimizer.step()
        assert updated
        losses.append(loss.item())
    if options.get("overlap_param_gather"):
        wrapped.start_param_sync(force_sync=True)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", [DISTRIBUTED, OVERLAPPED], ids=["plain", "overlapped"])
def test_equal_to_the_whole_optimizer(options, dtype):
    """To the bit: sharding moves numbers, and adds none."""
    with world.parallel():
        losses, weights = train(dtype, **options)
        expected_losses, expected = train(dtype)
    assert losses == expected_losses
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name
