"""What the weights are before training, and that building a layer leaves the config as it was."""

from dataclasses import replace

import pytest
import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from tests.support.cases import TINY
from tests.support.harness import Setup, build_attention
from tests.support.models import gpt_model

# Wide enough that a standard deviation is known to one percent.
WIDE = replace(TINY, hidden=160, q_lora_rank=96, kv_lora_rank=96, nope=32, rope=16, v=32)
SHAPES = {"q_lora": WIDE, "no_q_lora": replace(WIDE, q_lora_rank=None)}
STD = 0.05


@pytest.mark.parametrize("num_layers", [1, 8, 61])
@pytest.mark.parametrize("shape", SHAPES)
def test_standard_deviations(shape, num_layers):
    """Megatron's: init_method_std, and over sqrt(2 layers) where a layer adds to the residual."""
    attention = build_attention(
        SHAPES[shape], Setup(dtype=torch.float32), num_layers=num_layers, init_method_std=STD
    )
    names = {"linear_kv_down_proj", "linear_k_up_proj", "linear_v_up_proj", "linear_proj"}
    names |= {"linear_q_down_proj", "linear_q_up_proj"} if shape == "q_lora" else {"linear_q_proj"}
    found = {n.removesuffix(".weight"): p for n, p in attention.named_parameters() if p.dim() == 2}
    assert set(found) == names
    for name, weight in found.items():
        expected = STD / (2 * num_layers) ** 0.5 if name == "linear_proj" else STD
        assert weight.std().item() == pytest.approx(expected, rel=0.05), name
        assert abs(weight.mean().item()) < 0.05 * expected, name
    assert all((p == 1).all() for p in attention.parameters() if p.dim() == 1)


@pytest.fixture
def _fused_accumulation(monkeypatch):
    """As if Megatron had found apex's kernel, which building a layer asks for."""
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)


def test_fused_accumulation_stays_on(_fused_accumulation):
    """W_UK and W_UV do without it; the other layers of the model must keep what was asked for."""
    model = gpt_model(num_layers=2, gradient_accumulation_fusion=True)
    assert model.config.gradient_accumulation_fusion
    attention = model.decoder.layers[0].self_attention
    assert attention.config is model.config
    hosts = [m for m in model.modules() if isinstance(m, (ColumnParallelLinear, RowParallelLinear))]
    assert attention.linear_proj in hosts and attention.linear_q_up_proj in hosts
    # Two in each attention, built before and after W_UK and W_UV, two in each MLP, the last layer.
    assert len(hosts) == 2 * (2 + 2) + 1
    assert all(module.gradient_accumulation_fusion for module in hosts)
