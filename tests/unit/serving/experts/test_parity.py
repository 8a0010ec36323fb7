"""Grouped experts in parity mode: to the bit what Megatron's experts give in it, in any batch.

Of a training forward, since that is what parity mode promises.
"""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from absorbed_mla.batch_invariant import batch_invariant_mode, requirements
from absorbed_mla.serving.experts.layer import GroupedMoE, group_experts
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from tests.support import needs
from tests.support.backends import determinism
from tests.support.cases import TINY, config_for
from tests.support.experts import ROUTED, activations, pair, signs_of_zero

pytestmark = needs.no_gpu

# Sums of many experts, which depend on their order and on every rounding; no vector is filled.
MANY = {
    **ROUTED,
    "num_moe_experts": 12,
    "moe_router_topk": 6,
    "moe_ffn_hidden_size": 20,
    "activation_func": torch.nn.functional.silu,
    "init_method_std": 0.3,
}
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
scores = pytest.mark.parametrize("score", ["sigmoid", "softmax"])


def layers(dtype: torch.dtype, score: str = "sigmoid"):
    """Megatron's MoE layer, as in training, and the grouped one, with the same weights."""
    fields = dict(MANY)
    if score == "softmax":
        fields |= {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False}
    sequential, grouped = (model.decoder.layers[1].mlp for model in pair(dtype=dtype, **fields))
    assert type(sequential.experts) is SequentialMLP
    return sequential.train(), grouped


def hidden(tokens: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, 1, TINY.hidden, generator=generator).to(dtype)


@torch.inference_mode()
def of_grouped(layer, x: Tensor) -> Tensor:
    return layer(x)[0]


@pytest.fixture(params=[None, 4], ids=["whole", "parts"])
def _on(request):
    with batch_invariant_mode("cpu", request.param):
        yield


@dtypes
@scores
@pytest.mark.parametrize("deterministic", [False, True])
def test_of_megatrons_experts(_on, dtype, score, deterministic):
    """Which adds up a token's experts by other operators where it is to be deterministic."""
    sequential, grouped = layers(dtype, score)
    with determinism(deterministic):
        for tokens, seed in ((1, 0), (7, 1), (90, 2), (90, 3)):
            x = hidden(tokens, dtype, seed)
            assert torch.equal(of_grouped(grouped, x), sequential(x)[0].detach()), tokens


@dtypes
def test_activation(_on, monkeypatch, dtype):
    """Also the signs of zeros, which sums hide."""
    x = signs_of_zero(24, MANY["moe_ffn_hidden_size"]).to(dtype)
    found, expected = activations(monkeypatch, *layers(dtype), x)
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())


@dtypes
def test_in_any_batch(_on, dtype):
    _, grouped = layers(dtype)
    x = hidden(40, dtype)
    whole = of_grouped(grouped, x)
    for sizes in ([1] * 8 + [32], [3, 33, 4], [39, 1]):
        parts = [of_grouped(grouped, part) for part in x.split(sizes)]
        assert torch.equal(torch.cat(parts), whole), sizes


def test_otherwise_bits_differ():
    """Outside of the mode: the comparison can fail."""
    sequential, grouped = layers(torch.float32)
    x = hidden(90, torch.float32)
    assert not torch.equal(of_grouped(grouped, x), sequential(x)[0].detach())


def test_router():
    """A choice in one pass has other bits than Megatron's operators, which the mode replaces."""
    router = layers(torch.float32)[1].router
    assert router._is_one_pass()
    with batch_invariant_mode("cpu"):
        assert not router._is_one_pass()


def test_nothing_is_added_by_atomics():
    """So a GPU needs no deterministic algorithms, which Megatron's experts need."""
    with determinism(False):
        for layer, refused in zip(layers(torch.float32), (True, False)):
            assert requirements._adds_experts_by_atomics(layer.config) is refused


def test_several_ranks_are_refused():
    config = config_for(TINY, torch.float32, **MANY)
    group = SimpleNamespace(size=lambda: 2)
    groups = SimpleNamespace(tp=group, tp_ep=group)
    with pytest.raises(ValueError, match="need one rank in parity mode, got 2: ranks that share"):
        GroupedMoE(config, pg_collection=groups, parity=True)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"bias_activation_fusion": True}, "need bias_activation_fusion False in parity mode"),
        ({"moe_permute_fusion": True}, "need moe_permute_fusion False in parity mode"),
    ],
)
def test_refused(fields, error):
    """What has other bits in Megatron's experts."""
    config = config_for(TINY, torch.float32, **MANY)
    for name, value in fields.items():
        setattr(config, name, value)
    spec = get_absorbed_mla_decoder_block_spec(config, backend="local")
    mlp = group_experts(spec, parity=True).layer_specs[1].submodules.mlp
    with pytest.raises(ValueError, match=error):
        mlp(config)
