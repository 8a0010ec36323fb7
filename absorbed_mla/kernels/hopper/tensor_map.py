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
    # The stride of an axis of one element is never used, but must be valid all the same.
    strides = [s if n > 1 else x.shape[-1] for n, s in zip(x.shape[:-1], x.stride())]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], list(block), _layout(block, x.dtype))


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Kept, because making one takes the host longer than all else here; kernels have few."""
    return gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[dtype])


def has_map(x: Tensor) -> bool:
    """Whether rows lie a multiple of 16 bytes apart, not 0, and begin at such an address."""
    strides = [s * x.element_size() for n, s in zip(x.shape[:-1], x.stride()) if n > 1]
    aligned = all(s > 0 and s % _ALIGNMENT == 0 for s in strides)
    return x.stride(-1) == 1 and aligned and x.data_ptr() % _ALIGNMENT == 0
