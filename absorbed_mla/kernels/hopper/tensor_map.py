"""Tensor maps: what the copy engine (TMA) loads blocks of a tensor to shared memory with."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.int32: gl.int32,
}
# Bytes that addresses and strides must be multiples of.
_ALIGNMENT = 16


def tensor_map(x: Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """The map of a tensor, or of a copy where the tensor lies as no map can describe.

    Args:
        x: Of one of these dtypes, not empty; its last axis a multiple of 16 bytes.
        block: Elements of each axis that a copy loads; beyond the end of the tensor it loads zeros.
    """
    if not has_map(x):
        # Not contiguous(), which returns a contiguous tensor as it is, even at an odd address.
        x = x.clone(memory_format=torch.contiguous_format)
    shape = list(x.shape)
    # The stride of an axis of one element is never used, but must be valid all the same.
    strides = [s if n > 1 else shape[-1] for n, s in zip(shape[:-1], x.stride())]
    # Its constructor checks again what has_map did, for most of the host's time of a launch.
    found = TensorDescriptor.__new__(TensorDescriptor)
    found.base, found.shape, found.strides = x, shape, [*strides, 1]
    found.block_shape, found.layout = _box(block, x.dtype)
    return found


@functools.cache
def _box(block: tuple[int, ...], dtype: torch.dtype) -> tuple[list[int], gl.NVMMASharedLayout]:
    """The block and its layout, kept, because checking and making them takes the host long."""
    layout = gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[dtype])
    TensorDescriptor.from_tensor(torch.empty(block, dtype=dtype), list(block), layout)
    return list(block), layout


def has_map(x: Tensor) -> bool:
    """Whether rows lie a multiple of 16 bytes apart, not 0, and begin at such an address."""
    strides = x.stride()
    if strides[-1] != 1 or x.data_ptr() % _ALIGNMENT:
        return False
    elements = _ALIGNMENT // x.element_size()
    return not any(n > 1 and (s <= 0 or s % elements) for n, s in zip(x.shape[:-1], strides))
