"""Batch-invariant operators on the CPU: a row's result depends on no other row, nor on its place.

A library chooses the kernel of a matrix product by its shape: with MKL on AVX-512, a row of fp32
gets other bits among 3 rows than among 4. So products here always have the same number of rows.
Elementwise functions use another formula for elements that do not fill a vector register, the last
ones of a tensor or of a thread's share: here tensors are padded to whole vectors.

All of them call the operators' ``out`` variants, which are not overridden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

# Rows of a product: more cost a decode, which has few; fewer cost a long prompt more calls.
TILE_ROWS = 32
# Columns to which narrower products are padded: with fewer, MKL sums in another order.
_LEAST_COLUMNS = 16
# A multiple of the elements that any vector loop of PyTorch takes at a time.
_VECTOR = 128
# Below the size at which PyTorch cuts work up among threads (32768).
_CHUNK = 16384

Product = Callable[..., Tensor]


def mm(left: Tensor, right: Tensor) -> Tensor:
    """``left`` [rows, width] times ``right`` [width, columns]."""
    return _in_tiles(torch.mm, left[None], right)[0]


def addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta=1, alpha=1) -> Tensor:
    """``beta * bias + alpha * left @ right``, rounded once more than PyTorch's."""
    product = mm(left, right)
    if alpha != 1:
        product = product * alpha
    return product if beta == 0 else torch.add(product, bias, alpha=beta)


def bmm(left: Tensor, right: Tensor) -> Tensor:
    """``left`` [B, rows, width] times ``right`` [B, width, columns]."""
    if is_one_matrix(right):
        return mm(left.reshape(-1, left.shape[-1]), right[0]).view(*left.shape[:2], right.shape[-1])
    return _in_tiles(torch.bmm, left, right)


def is_one_matrix(right: Tensor) -> bool:
    """Whether ``right`` [B, width, columns] is one matrix expanded, as linear layers pass it."""
    return len(right) > 0 and (len(right) == 1 or not right.stride(0))


def in_vectors(
    function: Callable[..., Tensor], x: Tensor, *args, result: str = "out", **kwargs
) -> Tensor:
    """An elementwise function, computed in whole vectors.

    Args:
        function: An operator's ``out`` variant.
        x: Of any shape.
        args: For ``function``, after ``x``; tensors have the shape of ``x``.
        result: What ``function`` calls its ``out``.
        kwargs: Likewise.
    """
    if not x.is_floating_point():
        x = x.to(torch.get_default_dtype())
    operands = [_whole_vectors(one) if isinstance(one, Tensor) else one for one in (x, *args)]
    flat = torch.empty_like(operands[0])
    for start in range(0, len(flat), _CHUNK):
        part = slice(start, start + _CHUNK)
        some = (one[part] if isinstance(one, Tensor) else one for one in operands)
        function(*some, **{result: flat[part]}, **kwargs)
    return flat[: x.numel()].view(x.shape)


def _whole_vectors(x: Tensor) -> Tensor:
    """The elements, and zeros behind them."""
    count = x.numel()
    flat = x.new_zeros(-(-count // _VECTOR) * _VECTOR)
    flat[:count].view(x.shape).copy_(x)
    return flat


def _in_tiles(product: Product, left: Tensor, right: Tensor) -> Tensor:
    """A product of ``left`` [B, rows, width], the same number of rows at a time."""
    batch, rows, width = left.shape
    columns = right.shape[-1]
    result = left.new_empty(batch, rows, columns)
    if not result.numel():
        return result
    if columns < _LEAST_COLUMNS:
        right = torch.nn.functional.pad(right, (0, _LEAST_COLUMNS - columns))
    if 0 in right.stride():  # expanded, as gradients of sums are
        right = right.contiguous()
    threads = torch.get_num_threads()
    at_a_time = _tile_rows(product, left.dtype, right.shape[-2:], right.stride()[-2:], threads)
    # Always the same memory: kernels may depend on the alignment of operands. Rows after the last
    # one are not used; they are zeroed because NaN would be slow.
    tile = left.new_zeros(batch, at_a_time, width)
    part = left.new_empty(batch, at_a_time, right.shape[-1])
    squeeze = product is torch.mm
    for first in range(0, rows, at_a_time):
        count = min(at_a_time, rows - first)
        tile[:, :count].copy_(left[:, first : first + count])
        product(tile[0] if squeeze else tile, right, out=part[0] if squeeze else part)
        result[:, first : first + count].copy_(part[:, :count, :columns])
    return result


@functools.lru_cache(maxsize=4096)
def _tile_rows(
    product: Product,
    dtype: torch.dtype,
    shape: tuple[int, int],
    stride: tuple[int, int],
    threads: int,
) -> int:
    """``TILE_ROWS`` if a row's result does not depend on its place among them, else 1.

    It does in products of fp64. Tested once for every shape, by permuting rows.
    """
    generator = torch.Generator().manual_seed(0)
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride))
    right = torch.empty_strided((2, *shape), (max(extent, 1), *stride), dtype=dtype)
    right.copy_(torch.randn(2, *shape, generator=generator))
    left = torch.randn(2, TILE_ROWS, shape[0], generator=generator).to(dtype)
    if product is torch.mm:
        left, right = left[0], right[0]
    found = product(left, right, out=left.new_empty(*left.shape[:-1], shape[1]))
    place = torch.arange(TILE_ROWS)
    for order in (place.flip(0), place.roll(1), place.roll(6), place.roll(16)):
        again = product(left[..., order, :], right, out=torch.empty_like(found))
        if not torch.equal(again, found[..., order, :]):
            return 1
    return TILE_ROWS
