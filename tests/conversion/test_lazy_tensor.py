"""Lazy tensors: parts, joins, what they are made of and what they cost."""

import contextlib
from dataclasses import replace

import pytest
import torch

from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession, concat, zeros
from tests.conversion.support import lazy, load_all


def load(tensor: LazyTensor) -> torch.Tensor:
    return load_all({"x": tensor})["x"]


def test_parts_of_a_tensor_in_order_are_the_tensor():
    """Otherwise what Megatron fuses would be read twice on its way through Hugging Face's names."""
    whole = lazy("x", torch.arange(12.0).reshape(6, 2))
    assert concat(whole.split([1, 2, 3])) is whole
    assert concat(whole.chunk(2)) is whole


@pytest.mark.parametrize("order", [(1, 0), (0,), (0, 0)])
def test_other_parts_are_not(order):
    values = torch.arange(12.0).reshape(6, 2)
    parts = lazy("x", values).chunk(3)[:2]
    expected = torch.cat([values.chunk(3)[i] for i in order])
    joined = concat([parts[i] for i in order])
    assert torch.equal(load(joined), expected)
    assert joined.shape == tuple(expected.shape)


def test_parts_along_another_dim_are_not():
    whole = lazy("x", torch.arange(4.0).reshape(2, 2))
    joined = concat(whole.chunk(2, dim=1), dim=0)
    assert load(joined).flatten().tolist() == [0, 2, 1, 3]


def test_joined_tensors_are_copied_to_their_places():
    """One at a time, also those of a part; the whole is never in memory beside its place."""
    values = torch.arange(30.0).reshape(5, 6)
    upper = concat([lazy("a", values[:2, :4]), lazy("b", values[:2, 4:])], dim=1)
    part = concat([upper, lazy("c", values[2:])]).narrow(0, 1, 3)
    target = torch.zeros(3, 6)
    with ReadSession() as session:
        replace(part, load=None).copy_to(target, session)
    assert torch.equal(target, values[1:4])


def test_leaves_are_what_it_is_made_of():
    a, b = lazy("a", torch.ones(2, 2)), lazy("b", torch.ones(2, 2))
    joined = concat([a.narrow(0, 0, 1), b]).view(6).to(torch.bfloat16)
    assert joined.leaves == {"a", "b"}
    assert zeros((3,), torch.float32).leaves == frozenset()


def test_view_and_dtype():
    values = torch.arange(6.0).reshape(2, 3)
    tensor = lazy("x", values).view(3, 2).to(torch.float16)
    assert (tensor.shape, tensor.dtype, tensor.nbytes) == ((3, 2), torch.float16, 12)
    assert torch.equal(load(tensor), values.reshape(3, 2).half())
    same = lazy("x", values)
    assert same.to(torch.float32) is same


def test_peak_counts_result_and_sources():
    a = lazy("a", torch.ones(4, 4))  # 64 bytes
    assert concat([a, a]).peak == 128 + 2 * 64
    assert a.to(torch.float64).peak == 64 + 128


def test_a_file_is_opened_once_per_session_and_closed():
    events = []

    @contextlib.contextmanager
    def file():
        events.append("open")
        yield "content"
        events.append("close")

    with ReadSession() as session:
        assert session.open("f", file) == session.open("f", file) == "content"
        assert events == ["open"]
    assert events == ["open", "close"]
