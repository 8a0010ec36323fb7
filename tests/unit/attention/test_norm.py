"""RMSNorm: its values in every precision, its dtype, and the mark of its weight."""

import pytest
import torch

from absorbed_mla.norm import RMSNorm
from tests.support.cases import TINY, config_for
from tests.support.numerics import relative_error


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equals_its_definition(dtype, zero_centered):
    """In bf16 only the result is rounded; a gain stored as an offset from 1 counts as gain."""
    config = config_for(TINY, dtype, layernorm_zero_centered_gamma=zero_centered)
    norm = RMSNorm(config, 24, eps=1e-2)
    initial = 0.0 if zero_centered else 1.0
    assert torch.equal(norm.weight.cpu(), torch.full((24,), initial, dtype=dtype))
    with torch.no_grad():
        norm.weight.add_(torch.linspace(-0.5, 0.5, 24).to(norm.weight))
    x = torch.randn(5, 2, 24, device=norm.weight.device).to(dtype)
    gain = norm.weight.double() + (1 if zero_centered else 0)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-2).sqrt() * gain
    found = norm(x)
    assert found.dtype == dtype
    assert relative_error(found, exact) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_marks_its_weight(sequence_parallel):
    """Megatron sums marked gradients over the ranks, each of which saw its own tokens only."""
    config = config_for(TINY)
    config.sequence_parallel = sequence_parallel
    assert RMSNorm(config, 8).weight.sequence_parallel == sequence_parallel


def test_is_printed_with_its_epsilon():
    assert repr(RMSNorm(config_for(TINY), 8, eps=1e-6)) == "RMSNorm(8, eps=1e-06)"


def test_residual_stream_in_fp32():
    """The norm before the attention hands on the parameters' dtype."""
    norm = RMSNorm(config_for(TINY, torch.bfloat16), TINY.hidden)
    assert norm(torch.randn(3, TINY.hidden)).dtype == torch.bfloat16
