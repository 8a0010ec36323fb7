"""The indexer's projections against the oracle, in float64."""

import pytest
import torch
from torch import nn

from absorbed_mla.dsa.hadamard import hadamard_transform
from absorbed_mla.dsa.layer_norm import LayerNorm
from tests import oracle_dsa
from tests.support import world
from tests.support.dsa import (
    PARAMETERS,
    TINY_DSA,
    VARIANTS,
    build_indexer,
    config_of,
    random_weights,
)
from tests.support.numerics import relative_error

BOUND = 1e-12
TOKENS, BATCH = 9, 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_index_vectors(variant):
    """Values and the gradients of all parameters; the input gets none."""
    dsa = VARIANTS[variant]
    weights = random_weights(dsa)
    indexer = build_indexer(dsa, weights)
    mla = dsa.mla
    x = torch.randn(TOKENS, BATCH, mla.hidden, dtype=torch.float64, requires_grad=True)
    latent = oracle_dsa.query_latent(mla, weights, x.flatten(0, 1)).unflatten(0, (TOKENS, BATCH))
    table = mla.rotary_table(TOKENS)
    found = indexer(*(t.to(world.device()) for t in (x, latent, *table)))

    leaves = {name: weights[name].clone().requires_grad_() for name in PARAMETERS}
    rows = [
        oracle_dsa.index_vectors(dsa, leaves, x[:, b].detach(), latent[:, b].detach(), table)
        for b in range(BATCH)
    ]
    expected = [torch.stack(parts, dim=1) for parts in zip(*rows, strict=True)]
    directions = [torch.randn_like(t) for t in expected]
    # Two layouts of rotated channels have other values, and the same products.
    if dsa.interleaved:
        order = [*range(0, mla.rope, 2), *range(1, mla.rope, 2), *range(mla.rope, dsa.width)]
        expected[:2] = (t[..., order] for t in expected[:2])
    for actual, truth in zip(found, expected, strict=True):
        assert relative_error(actual, truth) < BOUND
    sum((a.cpu() * d).sum() for a, d in zip(found, directions, strict=True)).backward()
    sum((a * d).sum() for a, d in zip(expected, directions, strict=True)).backward()
    for name, its in PARAMETERS.items():
        assert relative_error(indexer.get_parameter(its).grad, leaves[name].grad) < BOUND, name
    assert x.grad is None


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_marks(sequence_parallel):
    """Averaged over tensor-parallel ranks, and not summed besides."""
    changes = {"sequence_parallel": sequence_parallel, "tensor_model_parallel_size": 2}
    indexer = build_indexer(TINY_DSA, random_weights(TINY_DSA), **changes)
    for parameter in indexer.parameters():
        assert parameter.average_gradients_across_tp_domain
        assert not parameter.sequence_parallel
        assert not getattr(parameter, "tensor_model_parallel", False)


def test_half_precision():
    """bf16 parameters: index vectors in bf16, head weights in fp32."""
    mla = TINY_DSA.mla
    indexer = build_indexer(TINY_DSA, random_weights(TINY_DSA)).bfloat16()
    x, latent = (torch.randn(TOKENS, BATCH, n).bfloat16() for n in (mla.hidden, mla.q_lora_rank))
    cos, sin = (t.float() for t in mla.rotary_table(TOKENS))
    found = indexer(*(t.to(world.device()) for t in (x, latent, cos, sin)))
    assert [t.dtype for t in found] == [torch.bfloat16, torch.bfloat16, torch.float32]


class TestLayerNorm:
    @pytest.mark.parametrize("zero_centered", [False, True])
    def test_is_torchs(self, zero_centered):
        config = config_of(
            TINY_DSA, normalization="LayerNorm", layernorm_zero_centered_gamma=zero_centered
        )
        norm, truth = LayerNorm(config, 16, 1e-3), nn.LayerNorm(16, 1e-3, dtype=torch.float64)
        with torch.no_grad():
            norm.weight.add_(torch.randn(16))
            norm.bias.add_(torch.randn(16))
            truth.weight.copy_(norm.weight + zero_centered)
            truth.bias.copy_(norm.bias)
        x = 3 + torch.randn(5, 16, dtype=torch.float64)
        assert relative_error(norm(x), truth(x)) < BOUND

    def test_refused(self):
        with pytest.raises(ValueError, match="normalization='RMSNorm'"):
            LayerNorm(config_of(TINY_DSA), 16)


class TestHadamard:
    @pytest.mark.parametrize("size", [1, 2, 16, 128])
    def test_matrix(self, size):
        actual = hadamard_transform(torch.eye(size, dtype=torch.float64))
        assert relative_error(actual, oracle_dsa.hadamard_matrix(size) / size**0.5) < BOUND
        assert relative_error(actual @ actual.T, torch.eye(size)) < BOUND

    def test_half_precision_is_rounded_once(self):
        x = torch.randn(7, 128, dtype=torch.bfloat16)
        expected = hadamard_transform(x.float()).bfloat16()
        assert torch.equal(hadamard_transform(x), expected)
