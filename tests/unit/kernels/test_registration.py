"""Operators of PyTorch made of functions: called, traced, and without gradients."""

import pytest
import torch
from torch import Tensor

from absorbed_mla.kernels.registration import operator

_calls: list[int] = []


@operator
def repeat_for_tests(x: Tensor, count: int, halved: bool = False) -> tuple[Tensor, Tensor]:
    _calls.append(count)
    # What a tracer could not follow.
    assert not torch.compiler.is_compiling()
    repeated = torch.from_numpy(x.numpy().repeat(count, 0))
    return repeated, x * (0.5 if halved else 1)


@torch.library.register_fake(repeat_for_tests)
def _(x, count, halved=False):
    return x.new_empty(x.shape[0] * count, *x.shape[1:]), x.new_empty(x.shape)


@operator
def doubled_for_tests(x: Tensor) -> Tensor:
    return x * 2


def test_calls_the_function():
    repeated, half = repeat_for_tests(torch.tensor([1.0, 2.0]), 2, halved=True)
    assert repeated.tolist() == [1, 1, 2, 2] and half.tolist() == [0.5, 1]
    assert torch.ops.absorbed_mla.repeat_for_tests.default is repeat_for_tests


@pytest.mark.parametrize("arguments", [(3,), (2, True)])
def test_opcheck(arguments):
    torch.library.opcheck(repeat_for_tests, (torch.randn(4, 2), *arguments))


def test_is_one_node_of_a_graph():
    compiled = torch.compile(lambda x: repeat_for_tests(x + 1, 3)[0] * 2, backend="eager")
    with torch.no_grad():
        for tokens in (2, 5):
            _calls.clear()
            x = torch.randn(tokens, 2)
            torch.testing.assert_close(compiled(x), (x + 1).repeat_interleave(3, 0) * 2)
            assert _calls == [3]


def test_has_no_gradient():
    """An error, as with ``torch.library.custom_op``; a gradient of zero would be wrong."""
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not doubled_for_tests(x).requires_grad
    twice = doubled_for_tests(x)
    assert twice.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="absorbed_mla::doubled_for_tests has no gradient"):
        (twice.sum() + x.sum()).backward()
