"""Rotating a query in place: the kernel, its twin in PyTorch, and autograd through both."""

from __future__ import annotations

import pytest
import torch

from absorbed_mla.rope import apply_rope, rotate_tail
from tests.support import world
from tests.support.numerics import relative_error

TOKENS, BATCH = 5, 2


def case(heads: int, width: int, rope: int, dtype: torch.dtype):
    """A query, what it should become, cosines and sines with a factor as YaRN has it."""
    generator = torch.Generator().manual_seed(heads)
    x = torch.randn(TOKENS, BATCH, heads * width, generator=generator, dtype=torch.float64)
    angles = torch.randn(TOKENS, rope // 2, generator=generator)
    cos, sin = 1.3 * angles.cos(), 1.3 * angles.sin()
    x, cos, sin = (y.to(world.device()) for y in (x.to(dtype), cos, sin))
    by_head = x.unflatten(-1, (heads, width))
    tail = apply_rope(by_head[..., width - rope :], cos, sin)
    return x, torch.cat((by_head[..., : width - rope], tail), dim=-1).flatten(2), cos, sin


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "width", "rope"), [(4, 20, 8), (3, 192, 64), (40, 16, 16), (2, 10, 6), (3, 8, 0)]
)
def test_is_apply_rope(heads, width, rope, dtype):
    """In place."""
    x, expected, cos, sin = case(heads, width, rope, dtype)
    given = x.clone()
    found = rotate_tail(given, cos, sin, heads)
    assert found.data_ptr() == given.data_ptr()
    assert relative_error(found.double(), expected.double()) < (
        1e-2 if dtype == torch.bfloat16 else 1e-6
    )


def test_gradient():
    x, _, cos, sin = case(3, 14, 6, torch.float64)
    x.requires_grad_()
    cos, sin = cos.double(), sin.double()
    assert torch.autograd.gradcheck(lambda y: rotate_tail(y.clone(), cos, sin, 3), x)


def test_kernel_equals_the_twin(monkeypatch):
    """Both directions, by Triton's interpreter where there is no GPU."""
    triton = pytest.importorskip("triton")
    if world.device().type != "cuda":
        monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    from absorbed_mla import rope
    from absorbed_mla.kernels import rotation

    if world.device().type != "cuda":
        interpreted = triton.jit(rotation._rotate_kernel.fn)
        monkeypatch.setattr(rotation, "_rotate_kernel", interpreted)
    for heads, width, channels in ((5, 24, 16), (3, 192, 64), (35, 12, 4)):
        x, _, cos, sin = case(heads, width, channels, torch.float32)
        for back in (False, True):
            actual, expected = (x.clone().unflatten(-1, (heads, width)) for _ in range(2))
            rotation.rotate(actual, cos, sin, back)
            tail = expected[..., width - channels :]
            twin = rope._unrotate if back else rope.apply_rope
            tail.copy_(twin(tail.clone(), cos, sin))
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
