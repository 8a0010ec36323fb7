"""Megatron's optimizer as scripts/train.py uses it, on a CPU as on a GPU, in every parallel layout.

If these fail, clipping depends on how a model is cut, bf16 loses small updates, or a step uses
gradients or weights that are not its own.
"""

import argparse
import math
from dataclasses import replace

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model
from torch import Tensor

from tests.support import world
from tests.support.models import gpt_model, token_batch
from tests.support.train_arguments import checked
from tests.support.training import OPTIONS, Training
from training.megatron_loop import set_up
from training.model import count_parameters, training_config

SMALL = (
    "--num-layers 4 --moe-layer-freq [0,1]*2 --hidden-size 32 --ffn-hidden-size 64 "
    "--moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32 --num-attention-heads 4 "
    "--seq-length 32 --lr-warmup-iters 0 --lr-decay-style constant"
)
# Of the whole model, as one process counts them.
PARAMETERS = 177_056
# How train.py is told of a layout, and Megatron of its groups, for any number of processes.
LAYOUTS = {
    "dp": ("", {}),
    "tp": ("--tensor-model-parallel-size {0}", {"tp": True}),
    "cp": ("--context-parallel-size {0}", {"cp": True}),
    "pp": ("--pipeline-model-parallel-size {0}", {"pipeline_model_parallel_size": True}),
    "ep": ("--expert-model-parallel-size {0}", {"expert_model_parallel_size": True}),
}
precisions = pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])


def built(options: str) -> tuple[argparse.Namespace, DistributedDataParallel, MegatronOptimizer]:
    """A model of train.py and its optimizer."""
    args = checked(f"{SMALL} {options}", world.size())
    model, optimizer, _ = set_up(args, training_config(args, None))
    return args, model, optimizer


def step(optimizer: MegatronOptimizer) -> float:
    updated, norm, _ = optimizer.step()
    assert updated
    optimizer.zero_grad()
    return float(norm)


def averages_of(optimizer: MegatronOptimizer, model: DistributedDataParallel) -> list[Tensor]:
    """Adam's running means of the gradients of all parameters of this rank."""
    model_state = unwrap_model(model).sharded_state_dict()
    state = nested_values(optimizer.sharded_state_dict(model_state, is_loading=False))
    tensors = (tensor for tensor in state if isinstance(tensor, ShardedBase))
    return [tensor.data for tensor in tensors if "optimizer.state.exp_avg." in tensor.key]


@precisions
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_norm_is_that_of_the_whole_model(layout, bf16):
    """Every parameter counts once; all are scaled by the same norm."""
    options, sizes = LAYOUTS[layout]
    options = options.format(world.size()) + " --bf16" * bf16
    if layout == "tp" and world.size() > 1:
        options += " --sequence-parallel"
    with world.parallel(**dict.fromkeys(sizes, world.size())):
        args, model, optimizer = built(options)
        for param in model.parameters():
            param.main_grad.fill_(2)
        norm = step(optimizer)
        assert count_parameters(model) == PARAMETERS
        assert norm == pytest.approx(2 * math.sqrt(PARAMETERS), rel=1e-6)
        averages = averages_of(optimizer, model)
    expected = (1 - args.adam_beta1) * 2 * args.clip_grad / norm
    assert len(averages) == len(list(model.parameters()))
    for average in averages:
        torch.testing.assert_close(average, torch.full_like(average, expected))


@precisions
def test_steps_are_those_of_adamw_in_high_precision(bf16):
    """In bf16 by fp32 copies: updates smaller than half an ulp of the parameter add up."""
    args, model, optimizer = built("--num-experts 0 --lr 1e-4" + " --bf16" * bf16)
    named = {name.split("module.")[-1]: param for name, param in model.named_parameters()}
    masters = {name: param.detach().double() for name, param in named.items()}
    first, second = ({name: torch.zeros_like(p) for name, p in masters.items()} for _ in range(2))
    beta1, beta2 = args.adam_beta1, args.adam_beta2
    generator = torch.Generator().manual_seed(0)
    for done in range(1, 5):
        for param in named.values():
            gradient = torch.randn(param.shape, generator=generator) * 0.01
            param.main_grad.copy_(gradient)
        gradients = {name: param.main_grad.double() for name, param in named.items()}
        own_norm = step(optimizer)
        scale = min(1.0, args.clip_grad / own_norm)
        for name, master in masters.items():
            gradient = gradients[name] * scale
            first[name] = beta1 * first[name] + (1 - beta1) * gradient
            second[name] = beta2 * second[name] + (1 - beta2) * gradient**2
            mean = first[name] / (1 - beta1**done)
            root = (second[name] / (1 - beta2**done)).sqrt()
            if master.ndim > 1:
                master *= 1 - args.lr * args.weight_decay
            master -= args.lr * mean / (root + args.adam_eps)
    assert scale < 1
    for name, master in masters.items():
        param = named[name]
        copy = param.main_param if bf16 else param
        torch.testing.assert_close(copy.double(), master, rtol=1e-6, atol=1e-8)
        assert torch.equal(param, copy.to(param.dtype)), name


def test_a_gradient_is_not_added_to_the_one_before():
    """In fp32, where Megatron takes a parameter's gradient for its own to add to."""
    training = Training(gpt_model(), replace(OPTIONS, lr=0.0), lambda step: token_batch(1))
    training.steps(3)
    assert training.norms == [training.norms[0]] * 3


def test_weights_that_are_loaded_stay():
    _, model, optimizer = built("--bf16 --lr 0")
    for param in model.parameters():
        param.data.fill_(0.5)
        param.main_grad.fill_(1)
    optimizer.reload_model_params()
    step(optimizer)
    assert all(bool((param == 0.5).all()) for param in model.parameters())
