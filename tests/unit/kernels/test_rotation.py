"""Rotating a query in place: the kernel, its twin in PyTorch, and autograd through both."""

import pytest
import torch

from absorbed_mla.rope import apply_rope, rotate_tail
from tests.support import world
from tests.support.backends import interpret_kernel
from tests.support.numerics import relative_error

TOKENS, BATCH = 5, 2


def case(heads: int, width: int, rope: int, dtype: torch.dtype):
    """A query, what it should become, cosines and sines with a factor as YaRN has it."""
    generator = torch.Generator().manual_seed(heads)
    x = torch.randn(TOKENS, BATCH, heads * width, generator=generator, dtype=torch.float64)
    angles = torch.randn(TOKENS, rope // 2, generator=generator)
    cos, sin = 1.3 * angles.cos(), 1.3 * angles.sin()
    x, cos, sin = (y.to(world.device()) for y in (x.to(dtype), cos, sin))
    return x, rotated(x, cos, sin, heads), cos, sin


def rotated(x, cos, sin, heads: int):
    """By ``apply_rope``, out of place."""
    by_head, rope = x.unflatten(-1, (heads, -1)), 2 * cos.shape[-1]
    rest, tail = by_head.split((by_head.shape[-1] - rope, rope), -1)
    return torch.cat((rest, apply_rope(tail, cos, sin)), dim=-1).flatten(2)


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
    bound = 1e-2 if dtype == torch.bfloat16 else 1e-6
    assert relative_error(found.double(), expected.double()) < bound


def test_gradient():
    x, _, cos, sin = case(3, 14, 6, torch.float64)
    x.requires_grad_()
    cos, sin = cos.double(), sin.double()
    assert torch.autograd.gradcheck(lambda y: rotate_tail(y.clone(), cos, sin, 3), x)


class HandsOn(torch.autograd.Function):
    """Returns its input, as a collective over one rank does; autograd makes it a view."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


VIEWS = {
    "view": lambda x: (x * 1).view_as(x),
    "slice": lambda x: torch.cat((x, x), dim=-1)[..., : x.shape[-1]],
    "narrowed tokens": lambda x: torch.cat((x, x))[: len(x)],
    "custom function": lambda x: HandsOn.apply(x * 1),
    "custom function of a leaf": HandsOn.apply,
    "view of a leaf": lambda x: x.view_as(x),
}


@pytest.mark.parametrize("name", VIEWS)
class TestViews:
    """Autograd refuses to write into some, and others show memory that is not the query's."""

    def test_value_and_gradient(self, name):
        heads, width, rope = 3, 14, 6
        leaf, expected, cos, sin = case(heads, width, rope, torch.float64)
        before = leaf.clone()
        leaf.requires_grad_()
        given = VIEWS[name](leaf)
        found = rotate_tail(given, cos, sin, heads)
        assert relative_error(found.detach(), expected) < 1e-6
        weights = torch.randn(found.shape, dtype=torch.float64).to(found)
        [actual] = torch.autograd.grad((found * weights).sum(), leaf)
        assert torch.equal(leaf.detach(), before), "the leaf is a parameter or another's input"
        [truth] = torch.autograd.grad((rotated(leaf, cos, sin, heads) * weights).sum(), leaf)
        assert relative_error(actual, truth) < 1e-12


def test_the_base_of_a_view_stays():
    """It may be what another part of the model goes on to use."""
    x, expected, cos, sin = case(3, 14, 6, torch.float32)
    base = (x.clone().requires_grad_() * 1).detach()
    found = rotate_tail(base.view_as(base), cos, sin, 3)
    assert relative_error(found.double(), expected.double()) < 1e-6
    assert torch.equal(base, x)


@torch.no_grad()
def test_without_gradients_a_view_is_rotated_in_place():
    """Nobody else needs it, and a copy would cost a pass over the query."""
    x, expected, cos, sin = case(3, 14, 6, torch.float32)
    base = torch.cat((x, x))
    found = rotate_tail(base[: len(x)], cos, sin, 3)
    assert found.data_ptr() == base.data_ptr()
    assert relative_error(found.double(), expected.double()) < 1e-6
    assert torch.equal(base[len(x) :], x)


def test_second_derivatives_are_refused():
    """The kernel's would be wrong without a word."""
    x, _, cos, sin = case(2, 10, 6, torch.float64)
    x.requires_grad_()
    found = rotate_tail(x * 1, cos, sin, 2)
    [grad] = torch.autograd.grad((found**2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        grad.sum().backward()


def test_kernel_equals_the_twin(monkeypatch):
    """Both directions, by Triton's interpreter where there is no GPU."""
    pytest.importorskip("triton")
    from absorbed_mla import rope
    from absorbed_mla.kernels import rotation

    interpret_kernel(monkeypatch, rotation, "_rotate_kernel")
    for heads, width, channels in ((5, 24, 16), (3, 192, 64), (35, 12, 4)):
        x, _, cos, sin = case(heads, width, channels, torch.float32)
        for back in (False, True):
            actual, expected = (x.clone().unflatten(-1, (heads, width)) for _ in range(2))
            rotation.rotate(actual, cos, sin, back)
            tail = expected[..., width - channels :]
            twin = rope._unrotate if back else rope.apply_rope
            tail.copy_(twin(tail.clone(), cos, sin))
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
