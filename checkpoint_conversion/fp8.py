"""FP8 weights with one scale per block of 128 x 128 values, as DeepSeek-V3 stores them.

``NAME.weight`` [M, N] is float8_e4m3fn and ``NAME.weight_scale_inv`` [ceil(M/128), ceil(N/128)]
holds the scales; a weight is its FP8 value times the scale of its block, in spite of the name. The
last blocks of a row or column may be smaller. Scales are float32 or narrower; those called ue8m0
are powers of two, stored as float32 (DeepSeek-V3.1) or as float8_e8m0fnu.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoint_conversion.config_fields import dtype_name
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession

BLOCK = 128
FP8 = torch.float8_e4m3fn
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
SCALE_FORMATS = ("float", "ue8m0")
SCALE_SUFFIX = "_scale_inv"
LARGEST = 448.0  # of e4m3
# Memory per value while a slab of 128 rows is converted: up to four float32 temporaries.
_SLAB_BYTES = 16


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight."""
    return tuple(-(-size // BLOCK) for size in shape)


def pair_problems(name: str, weight: LazyTensor, scale: LazyTensor | None) -> list[str]:
    """Problems with shapes and dtypes of an FP8 weight and its scales."""
    if len(weight.shape) != 2:
        return [f"{name} is FP8 of shape {weight.shape}; only matrices can be block-scaled"]
    expected = scale_shape(weight.shape)
    if scale is None:
        return [
            f"{name} is FP8, but {name}{SCALE_SUFFIX} is missing; expected shape {expected}. "
            "Without its scales it means nothing"
        ]
    problems = []
    if scale.shape != expected:
        problems.append(
            f"{name}{SCALE_SUFFIX} has shape {scale.shape}; expected {expected}, one scale per "
            f"{BLOCK} x {BLOCK} block of {weight.shape}"
        )
    if scale.dtype not in SCALE_DTYPES:
        accepted = ", ".join(dtype_name(dtype) for dtype in SCALE_DTYPES)
        problems.append(f"{name}{SCALE_SUFFIX} is {scale.dtype}; expected one of {accepted}")
    return problems


def dequantise(weight: Tensor, scale_inv: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The values of an FP8 weight.

    Args:
        weight: float8_e4m3fn, [M, N].
        scale_inv: [ceil(M/128), ceil(N/128)].
        dtype: Dtype of the result, to which value times scale is rounded once.
        name: Name of the weight, for error messages.

    Raises:
        CheckpointError: If a value or a scale is not a finite number, or ``dtype`` cannot hold one.
    """
    scales = scale_inv.float()
    if not scales.isfinite().all():
        raise CheckpointError(f"{name}{SCALE_SUFFIX} holds scales that are not finite numbers")
    may_overflow = scales.abs().max() * LARGEST > torch.finfo(dtype).max
    result = torch.empty(weight.shape, dtype=dtype)
    for rows, slab in _slabs(weight):
        values = _to_float(slab, name)
        values *= _per_column(scales[rows.start // BLOCK], weight.shape[1])
        result[rows] = values
        if may_overflow and not result[rows].isfinite().all():
            raise CheckpointError(
                f"{name} has values up to {values.abs().max():g}, which {dtype} cannot hold"
            )
    return result


@dataclass(frozen=True)
class QuantisationError:
    """Error of quantising a tensor.

    Attributes:
        max: Largest difference, relative to the largest magnitude.
        rms: Root mean square of the differences, relative to that of the values.
    """

    max: float
    rms: float


def quantise(
    tensor: Tensor, scale_format: str, name: str
) -> tuple[Tensor, Tensor, QuantisationError]:
    """Round a matrix to FP8, with fresh scales that let the largest value of each block just fit.

    Args:
        tensor: [M, N], floating.
        scale_format: ``"float"``: the largest magnitude over 448; ``"ue8m0"``: the next power of
            two from there.
        name: Name of the weight, for error messages.

    Returns:
        The weight, its scales (float32), and the error.

    Raises:
        CheckpointError: If a value is not a finite number.
    """
    assert scale_format in SCALE_FORMATS
    weight = torch.empty(tensor.shape, dtype=FP8, device=tensor.device)
    blocks = scale_shape(tuple(tensor.shape))
    scales = torch.empty(blocks, dtype=torch.float32, device=tensor.device)
    largest = worst = squares = squared_errors = 0.0
    for rows, slab in _slabs(tensor):
        values = slab.float()
        largest_of_blocks = _largest_of_blocks(values)
        if not largest_of_blocks.isfinite().all():
            raise CheckpointError(
                f"{name} holds values that are not finite numbers; it cannot be quantised to FP8"
            )
        scales[rows.start // BLOCK] = _scales(largest_of_blocks, scale_format)
        per_column = _per_column(scales[rows.start // BLOCK], tensor.shape[1])
        weight[rows] = values / per_column
        largest = max(largest, largest_of_blocks.max().item())
        squares += values.square().sum(dtype=torch.float64).item()
        # Not in place: values may be the tensor itself.
        difference = _to_float(weight[rows], name) * per_column - values
        worst = max(worst, difference.abs().max().item())
        squared_errors += difference.square().sum(dtype=torch.float64).item()
    rms = math.sqrt(squared_errors / squares) if squares else 0.0
    return weight, scales, QuantisationError(worst / largest if largest else 0.0, rms)


def dequantised(weight: LazyTensor, scale: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    """A lazy tensor of an FP8 weight's values; reading a part reads only the blocks it lies in."""
    name = ", ".join(weight.leaves)

    def load(session: ReadSession) -> Tensor:
        return dequantise(weight.load(session), scale.load(session), dtype, name)

    def part(dim: int, start: int, length: int) -> LazyTensor:
        first = start // BLOCK * BLOCK
        last = min(-(-(start + length) // BLOCK) * BLOCK, weight.shape[dim])
        blocks = -(-(last - first) // BLOCK)
        whole = dequantised(
            weight.narrow(dim, first, last - first),
            scale.narrow(dim, first // BLOCK, blocks),
            dtype,
        )
        if (first, last) == (start, start + length):
            return whole
        # Without its own parts, which would be the same blocks again.
        return dataclasses.replace(whole, part=None).narrow(dim, start - first, length)

    nbytes = math.prod(weight.shape) * dtype.itemsize
    peak = weight.peak + scale.peak + nbytes + _slab_bytes(weight.shape)
    return LazyTensor(weight.shape, dtype, load, weight.leaves | scale.leaves, peak, part)


@dataclass(frozen=True)
class QuantisedTensor:
    """A lazy tensor that is quantised on loading, once per session.

    Attributes:
        stored: Values, scales and more, by what follows the weight's name. They are to be loaded in
            one session, and the ``peak`` of the first covers all.
        error: Computes the quantisation error.
    """

    stored: Mapping[str, LazyTensor]
    error: Callable[[ReadSession], QuantisationError]


def quantised(tensor: LazyTensor, scale_format: str) -> QuantisedTensor:
    """Lazily quantise a matrix; see :func:`quantise`."""
    key = object()
    name = ", ".join(sorted(tensor.leaves))

    def results(session: ReadSession) -> tuple[Tensor, Tensor, QuantisationError]:
        return session.once(key, lambda: quantise(tensor.load(session), scale_format, name))

    nbytes = math.prod(tensor.shape) * FP8.itemsize
    peak = tensor.peak + nbytes + _slab_bytes(tensor.shape)
    blocks = scale_shape(tensor.shape)
    scale_bytes = math.prod(blocks) * torch.float32.itemsize
    leaves = tensor.leaves
    stored = {
        "": LazyTensor(tensor.shape, FP8, lambda s: results(s)[0], leaves, peak),
        SCALE_SUFFIX: LazyTensor(
            blocks, torch.float32, lambda s: results(s)[1], leaves, scale_bytes
        ),
    }
    return QuantisedTensor(stored, lambda session: results(session)[2])


def _slabs(tensor: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """A matrix in rows of blocks, so that little of it is in float32 at any moment."""
    for start in range(0, tensor.shape[0], BLOCK):
        rows = slice(start, start + BLOCK)
        yield rows, tensor[rows]


def _slab_bytes(shape: tuple[int, ...]) -> int:
    return min(BLOCK, shape[0]) * shape[1] * _SLAB_BYTES


def _per_column(scales: Tensor, columns: int) -> Tensor:
    """The scales of one row of blocks, for every column."""
    return scales.repeat_interleave(BLOCK)[:columns]


def _to_float(slab: Tensor, name: str) -> Tensor:
    """FP8 to float32, several times faster than ``float()``, which goes value by value.

    The bits of e4m3, moved to where float16 has sign, exponent and mantissa, are the float16 of the
    value divided by 256, because the exponents' biases are 7 and 15; also below the normal numbers.
    """
    if slab.view(torch.int8).max() == 127 or slab.view(torch.uint8).max() == 255:
        raise CheckpointError(f"{name} holds FP8 values that are not numbers")
    bits = slab.view(torch.int8).to(torch.int16)
    bits <<= 7
    # Clears the copy of the sign bit that widening to 16 bits made.
    bits &= ~0x4000
    return bits.view(torch.float16).float().mul_(256)


def _largest_of_blocks(slab: Tensor) -> Tensor:
    """The largest magnitude in each block of one row of blocks."""
    padding = -slab.shape[1] % BLOCK
    padded = torch.nn.functional.pad(slab, (0, padding)) if padding else slab
    return padded.view(len(slab), -1, BLOCK).abs().amax(dim=(0, 2))


def _scales(largest: Tensor, scale_format: str) -> Tensor:
    """Scales by which the largest magnitudes of blocks become at most 448."""
    if scale_format == "float":
        scales = largest / LARGEST
    else:
        # 448 is 0.875 * 2**9, and the mantissa is from 0.5 to below 1.
        mantissa, exponent = torch.frexp(largest)
        steps = exponent - 9 + (mantissa > 0.875).int()
        scales = torch.ldexp(torch.ones_like(largest), steps)
    # Below the normal numbers a scale would have few digits, or be zero.
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(largest > 0, scales, 1.0)
