"""Training a part of the layer, or after evaluating: what fine-tuning does first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from absorbed_mla.norm import RMSNorm
from tests.support import world
from tests.support.cases import TINY, config_for, random_weights
from tests.support.harness import Setup, build_attention, load_weights

MIXES = [(), ("mla_up_proj",), ("core_attn",), ("mla_up_proj", "core_attn")]
TRAINED = [
    {"linear_q_up_proj.weight"},
    {"linear_kv_down_proj.weight"},
    {"linear_k_up_proj.weight"},
    {"linear_v_up_proj.weight"},
    {"q_layernorm.weight", "kv_layernorm.weight"},
    {"linear_proj.weight"},
    {"linear_q_proj.weight", "linear_proj.weight"},
]


def gradients(mla, trained: set[str], recompute: tuple[str, ...], form: str) -> dict:
    """Gradients of the trained parameters; the input needs none, as after a frozen embedding."""
    setup = Setup(form=form, recompute=recompute)
    attention = build_attention(mla, setup)
    load_weights(attention, mla, setup, random_weights(mla))
    for name, parameter in attention.named_parameters():
        parameter.requires_grad_(name in trained)
    x = torch.randn(9, 2, mla.hidden, generator=torch.Generator().manual_seed(1))
    output, _ = attention(x.to(world.device(), torch.float64), None)
    output.square().sum().backward()
    return {n: p.grad for n, p in attention.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("trained", TRAINED, ids=lambda names: "+".join(sorted(names)))
def test_frozen_parameters(trained, form):
    """Megatron's checkpoint alone would raise, or leave a parameter without gradient silently."""
    mla = replace(TINY, q_lora_rank=None) if "linear_q_proj.weight" in trained else TINY
    expected = gradients(mla, trained, (), form)
    assert set(expected) == trained
    for recompute in MIXES[1:]:
        for name, gradient in gradients(mla, trained, recompute, form).items():
            assert gradient is not None and torch.equal(gradient, expected[name]), recompute


def test_training_after_evaluation_in_inference_mode():
    attention = build_attention(TINY, Setup())
    x = torch.randn(37, 1, TINY.hidden, dtype=torch.float64, device=world.device())
    with torch.inference_mode():
        attention(x, None)
    output, _ = attention(x.requires_grad_(), None)
    output.sum().backward()
    assert x.grad is not None


def test_residual_stream_in_fp32():
    """The norm before the attention hands on the parameters' dtype."""
    norm = RMSNorm(config_for(TINY, torch.bfloat16), TINY.hidden)
    assert norm(torch.randn(3, TINY.hidden)).dtype == torch.bfloat16
