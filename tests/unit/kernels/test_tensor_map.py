"""Tensors that the copy engine can load as they lie, and those that it must get a copy of."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from triton.experimental.gluon import language as gl

from absorbed_mla.kernels.hopper.tensor_map import tensor_map

BLOCK = (4, 1, 64)


def odd_address(shape: tuple[int, ...]) -> torch.Tensor:
    """Contiguous, two bytes behind an aligned address."""
    size = torch.Size(shape).numel()
    return torch.randn(size + 8).bfloat16()[1 : size + 1].view(shape)


TENSORS = {
    "contiguous": (torch.randn(8, 2, 64).bfloat16(), False),
    "view of wider rows": (torch.randn(8, 2, 128).bfloat16()[..., 64:], False),
    "one row, whose stride is never used": (torch.randn(1, 2, 64).bfloat16()[:1], False),
    "odd address": (odd_address((8, 2, 64)), True),
    "odd rows": (torch.randn(8, 2, 65).bfloat16()[..., :64], True),
    "expanded": (torch.randn(1, 2, 64).bfloat16().expand(8, 2, 64), True),
    "transposed": (torch.randn(8, 64, 2).bfloat16().transpose(1, 2), True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_describes_the_tensor_or_a_copy(name):
    x, copied = TENSORS[name]
    found = tensor_map(x, BLOCK).base
    assert torch.equal(found, x)
    assert found.data_ptr() % 16 == 0
    assert (found.data_ptr() != x.data_ptr()) == copied


def test_one_row_of_a_table_that_is_wider():
    """Of which a map cannot say that the next row begins where this one ends."""
    row = torch.randn(1, 32)[:, :30]
    found = tensor_map(row, (1, 64), gl.NVMMASharedLayout(0, 32))
    assert found.base is row and found.strides == [32, 1]
    assert found.block_shape == [1, 64] and found.layout.swizzle_byte_width == 0


def test_shapes_and_types_have_their_own_maps():
    x = torch.randn(8, 2, 64).bfloat16()
    for operand in (x, x.half(), x[:4], x[:, :1], x):
        found = tensor_map(operand, BLOCK)
        assert found.base is operand
        assert (found.shape, found.strides) == ([*operand.shape], [*operand.stride()])
    assert tensor_map(x, BLOCK).box != tensor_map(x.half(), BLOCK).box
