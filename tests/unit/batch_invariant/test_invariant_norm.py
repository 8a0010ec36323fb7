"""Parity mode's RMSNorm on GPUs: values and gradients against fp64, bits of a row.

In Triton's interpreter without a GPU.
"""

import pytest
import torch
from torch import Tensor

from absorbed_mla.batch_invariant import batch_invariant_mode, norms
from absorbed_mla.norm import RMSNorm
from tests.support import needs, world
from tests.support.backends import triton_interpreter
from tests.support.cases import TINY, config_for
from tests.support.numerics import check_gradients, random, relative_error

with triton_interpreter():
    import absorbed_mla.kernels.invariant.rms_norm as kernel

pytestmark = pytest.mark.usefixtures("interpreted")
EPS = 1e-5
BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 1e-2}
WIDTH = 75


def exact(x: Tensor, weight: Tensor, zero_centered: bool) -> Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return normed * (weight + zero_centered)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS, ids=["fp32", "bf16"])
def test_value_and_gradients(dtype, zero_centered, monkeypatch):
    """With weights far from 1, and programs that have several rows."""
    monkeypatch.setattr(kernel, "_PROGRAMS", 3)
    leaves = [random(5, 2, WIDTH, dtype=dtype), random(WIDTH, dtype=dtype, seed=1)]
    found = check_gradients(
        lambda x, weight: norms.rms_norm(x, weight, EPS, zero_centered, dtype),
        lambda x, weight: exact(x, weight, zero_centered),
        leaves,
        BOUNDS[dtype],
    )
    assert found.dtype == dtype


def test_of_another_dtype():
    """A residual stream in fp32."""
    x, weight = random(3, WIDTH), random(WIDTH, dtype=torch.bfloat16, seed=1)
    found = norms.rms_norm(x, weight, EPS, False, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert relative_error(found, exact(x.double(), weight.double(), False)) < 1e-2


def test_rows_are_independent():
    x, weight = random(40, WIDTH), random(WIDTH, seed=1)
    whole = norms.rms_norm(x, weight, EPS, False, x.dtype)
    for first, count in ((0, 1), (3, 7), (8, 32)):
        rows = slice(first, first + count)
        assert torch.equal(norms.rms_norm(x[rows], weight, EPS, False, x.dtype), whole[rows])


def test_of_no_rows():
    x, weight = random(0, WIDTH).requires_grad_(), random(WIDTH).requires_grad_()
    norms.rms_norm(x, weight, EPS, False, x.dtype).sum().backward()
    assert x.grad.shape == x.shape and torch.equal(weight.grad, torch.zeros_like(weight))


class TestInTransformerEngine:
    """The norm of its fused layers, called as it calls its own."""

    @pytest.mark.parametrize("given", [False, True])
    def test_result_and_scale(self, given):
        x, weight = random(4, WIDTH, dtype=torch.bfloat16), random(WIDTH, seed=1)
        out = torch.empty_like(x) if given else None
        found, mean, scale = norms.apply_normalization(
            x, out, weight, None, EPS, None, torch.bfloat16, "RMSNorm", 0, True
        )
        assert mean is None and (found is out or not given)
        assert relative_error(found, exact(x.double(), weight.double(), True)) < 1e-2
        expected = torch.rsqrt(x.double().square().mean(-1) + EPS)
        assert scale.shape == (4,) and relative_error(scale, expected) < 3e-6

    def test_what_is_passed_on(self, monkeypatch):
        """LayerNorm, and results in FP8."""
        calls = []
        monkeypatch.setattr(
            norms.megatron_operators,
            "megatron_te_normalization",
            lambda *given: calls.append(given),
        )
        x, weight = random(4, WIDTH), random(WIDTH)
        for bias, quantizer, kind in ((weight, None, "LayerNorm"), (None, object(), "RMSNorm")):
            given = (x, None, weight, bias, EPS, quantizer, x.dtype, kind, 0, False)
            norms.apply_normalization(*given)
            assert calls[-1] == given


@needs.gpu
def test_the_layers_norm_takes_it_on_a_gpu():
    layer = RMSNorm(config_for(TINY, torch.bfloat16), WIDTH).to(world.device())
    x = random(3, WIDTH, dtype=torch.bfloat16).requires_grad_()
    assert type(layer(x).grad_fn).__name__ != "_RMSNormBackward"
    with batch_invariant_mode():
        found = layer(x)
        assert type(found.grad_fn).__name__ == "_RMSNormBackward"
        assert torch.equal(layer(x[:1]), found[:1])
