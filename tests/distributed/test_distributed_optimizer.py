"""Megatron's distributed optimizer: each rank keeps the state of a share of the parameters.

If it fails, a mark or the memory of a parameter is not what Megatron's buffers expect.
"""

from dataclasses import replace

import torch

from absorbed_mla.lora import LoRAConfig, add_lora
from tests.support import needs, world
from tests.support.combinations import grid
from tests.support.models import MIXED, gpt_model, token_batch
from tests.support.training import OPTIONS, Training

pytestmark = needs.processes(2)

STEPS = 5
DISTRIBUTED = {"use_distributed_optimizer": True}
GATHERED = {**DISTRIBUTED, "overlap_param_gather": True}


def train(dtype: torch.dtype, sharding: dict, lora: bool = False, **ddp: bool):
    """Losses and weights; every rank has batches of its own."""
    model = gpt_model(dtype=dtype, **MIXED)
    if lora:
        torch.manual_seed(0)
        add_lora(model, LoRAConfig(r=3))
    # The norm of shards is summed in another order.
    options = replace(OPTIONS, clip_grad=0.0, bf16=dtype == torch.bfloat16, params_dtype=dtype)
    training = Training(
        model,
        replace(options, **sharding),
        lambda step: token_batch(2 * step + world.rank()),
        **sharding,
        **ddp,
    )
    losses = training.steps(STEPS)
    if sharding == GATHERED:
        training.wrapped.start_param_sync(force_sync=True)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


@grid(
    1,
    {
        "how": {
            "plain": (False, False),
            "overlapped": (True, False),
            "overlapped-lora": (True, True),
        },
        "dtype": {"fp32": torch.float32, "bf16": torch.bfloat16},
    },
)
def test_equal_to_the_whole_optimizer(how, dtype):
    """To the bit: sharding moves numbers, and adds none."""
    overlapped, lora = how
    with world.parallel():
        sharding = GATHERED if overlapped else DISTRIBUTED
        losses, weights = train(dtype, sharding, lora, overlap_grad_reduce=overlapped)
        expected_losses, expected = train(dtype, {}, lora)
    assert losses == expected_losses
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name
