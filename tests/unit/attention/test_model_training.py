"""Whole models train: every dtype, dense and mixed layers, and full recomputation on the way."""

from __future__ import annotations

import pytest
import torch
from megatron.core import tensor_parallel

from tests.support.models import MIXED, call, gpt_model, token_batch

DENSE = {"num_layers": 2}
SELECTIVE = {
    "recompute_granularity": "selective",
    "recompute_modules": ["mla_up_proj", "core_attn"],
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SOME_LAYERS = {**FULL, "recompute_method": "block", "recompute_num_layers": 1}


def gradients(**config) -> dict[str, torch.Tensor]:
    """Of the loss of one batch with every kind of dropout, and the loss itself."""
    model = gpt_model(attention_dropout=0.1, hidden_dropout=0.1, **config)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    loss = call(model, labels=token_batch(6)).mean()
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}


@pytest.mark.parametrize(
    "recompute", [SELECTIVE, FULL, SOME_LAYERS], ids=["selective", "full", "block"]
)
@pytest.mark.parametrize("layers", [DENSE, MIXED], ids=["dense", "mixed"])
def test_recomputation_changes_no_bit(layers, recompute):
    """Of a whole model, with dropout in the attention and behind it."""
    expected, actual = gradients(**layers), gradients(**layers, **recompute)
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name
    assert not torch.equal(gradients(**layers, seed=1)["loss"], expected["loss"])


@pytest.mark.parametrize("layers", [DENSE, MIXED], ids=["dense", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_loss_goes_down(dtype, layers):
    """A few steps on one batch, with recomputation, as a user would start."""
    model = gpt_model(dtype=dtype, **layers, **SELECTIVE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = call(model, labels=token_batch(6)).float().mean()
        # fp16 gradients of a mean over tokens would underflow.
        (loss * 64).backward()
        for parameter in model.parameters():
            assert torch.isfinite(parameter.grad).all()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses
