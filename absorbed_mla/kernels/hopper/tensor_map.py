"""TMA descriptors: tensor maps by which blocks of a tensor are loaded to shared memory."""

from __future__ import annotations

import functools
from typing import Any

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


def tensor_map(
    x: Tensor, block: tuple[int, ...], layout: gl.NVMMASharedLayout | None = None
) -> TensorDescriptor:
    """The map of a tensor, or of a copy where the tensor lies as no map can describe.

    Args:
        x: Of one of these dtypes, not empty; its last axis a multiple of 16 bytes.
        block: Elements of each axis that a copy loads; beyond the end of the tensor it loads zeros.
        layout: Of the block in shared memory; the one with the widest swizzle, if None.
    """
    known = (
        None if x.data_ptr() % _ALIGNMENT else _known(x.shape, x.stride(), x.dtype, block, layout)
    )
    if known is None:
        # Not contiguous(), which returns a contiguous tensor as it is, even at an odd address.
        x = x.clone(memory_format=torch.contiguous_format)
        known = _known(x.shape, x.stride(), x.dtype, block, layout)
        assert known is not None, "a copy lies as it must"
    # Its constructor would check at every launch what is checked once for these shapes.
    found = TensorDescriptor.__new__(TensorDescriptor)
    vars(found).update(known, base=x)
    return found


def has_map(x: Tensor) -> bool:
    """Whether rows lie a multiple of 16 bytes apart, not 0, and begin at such an address."""
    return x.data_ptr() % _ALIGNMENT == 0 and _lies_in_rows(x.shape, x.stride(), x.dtype)


def _lies_in_rows(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    rows = zip(shape[:-1], strides)
    return strides[-1] == 1 and all(n == 1 or _is_apart(s, dtype) for n, s in rows)


def _is_apart(stride: int, dtype: torch.dtype) -> bool:
    return stride > 0 and stride * dtype.itemsize % _ALIGNMENT == 0


# Launches make maps of the same few shapes, again and again.
@functools.lru_cache(maxsize=1024)
def _known(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    block: tuple[int, ...],
    layout: gl.NVMMASharedLayout | None,
) -> dict[str, Any] | None:
    """The attributes of a map but its tensor, or None where the tensor has none.

    Besides those of a map in Triton: ``box``, all that a kernel is compiled for; see ``launch``.
    """
    if not _lies_in_rows(shape, strides, dtype):
        return None
    # The stride of an axis of one element is never used, but must be valid all the same.
    rows = [s if _is_apart(s, dtype) else shape[-1] for s in strides[:-1]]
    layout = layout or gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[dtype])
    known = {
        "shape": list(shape),
        "strides": [*rows, 1],
        "block_shape": list(block),
        "layout": layout,
    }
    TensorDescriptor(torch.empty(block, dtype=dtype), **known)  # checks the rest
    return known | {"box": f"{dtype}{block}{layout}"}
