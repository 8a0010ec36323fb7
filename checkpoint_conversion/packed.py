"""Weights of four bits as compressed-tensors packs them, with a scale for 32 values of a row.

``NAME.weight`` [M, N] is stored as ``NAME.weight_packed``, two codes in a byte, the first one in
the low bits, and ``NAME.weight_scale`` [M, N/32]. INT4 (``pack-quantized``, Kimi-K2-Thinking to
K2.7) has eight codes in an int32, 8 stands for zero, and ``NAME.weight_shape`` holds M and N. MXFP4
(``mxfp4-pack-quantized``, OCP Microscaling Formats 1.0) has uint8 with two codes in e2m1, and
scales in e8m0: 2 ** (scale - 127).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoint_conversion.config_fields import dtype_name
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.fp8 import QuantisationError, QuantisedTensor
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession, zeros

GROUP = 32
PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
# Values that are converted at a time, and memory for each: codes, bf16 and float32 temporaries.
_SLAB, _SLAB_BYTES = 1 << 18, 20
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Packing(NamedTuple):
    """One of the two formats.

    Attributes:
        name: In reports.
        format: In those of compressed-tensors' ``quantization_config``.
        kind: ``type`` of its weights there.
        dtype: Of ``weight_packed``.
        scales: Accepted dtypes of ``weight_scale``.
        values: Of the 16 codes, before they are scaled.
    """

    name: str
    format: str
    kind: str
    dtype: torch.dtype
    scales: tuple[torch.dtype, ...]
    values: tuple[float, ...]

    @property
    def title(self) -> str:
        """For reports."""
        return f"{self.name} in groups of {GROUP}"


INT4 = Packing(
    "INT4",
    "pack-quantized",
    "int",
    torch.int32,
    (torch.bfloat16, torch.float16, torch.float32),
    tuple(map(float, range(-8, 8))),
)
MXFP4 = Packing(
    "MXFP4",
    "mxfp4-pack-quantized",
    "float",
    torch.uint8,
    (torch.uint8, torch.float8_e8m0fnu),
    (*_E2M1, *(-value for value in _E2M1)),
)
PACKINGS = (INT4, MXFP4)


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """A stored four-bit weight.

    Attributes:
        name: Of the weight.
        packed: Two codes in a byte.
        scale: [M, N/32]; None if it is missing.
        sizes: ``weight_shape``, M and N; None if it is not stored.
    """

    name: str
    packed: LazyTensor
    scale: LazyTensor | None
    sizes: LazyTensor | None = None

    @property
    def packing(self) -> Packing:
        """The format."""
        return MXFP4 if self.packed.dtype == MXFP4.dtype else INT4

    @property
    def shape(self) -> tuple[int, ...]:
        """M and N."""
        *rows, words = self.packed.shape or (0,)
        return (*rows, words * self.packed.dtype.itemsize * 2)

    def problems(self) -> Iterator[str]:
        """What is wrong with shapes and dtypes."""
        what, packed, scale = f"{self.name}{PACKED}", self.packed, self.scale
        if packed.dtype not in [one.dtype for one in PACKINGS]:
            yield f"{what} is {packed.dtype}; expected int32 (INT4) or uint8 (MXFP4)"
        elif len(packed.shape) != 2 or self.shape[1] % GROUP:
            yield f"{what} has shape {packed.shape}; expected a matrix of groups of {GROUP} values"
        elif scale is None:
            yield f"{self.name}{SCALE} is missing; expected shape {self._scale_shape}"
        elif scale.shape != self._scale_shape:
            yield (
                f"{self.name}{SCALE} has shape {scale.shape}; expected {self._scale_shape}, one "
                f"scale for {GROUP} values of a row of {self.shape}"
            )
        elif scale.dtype not in self.packing.scales:
            accepted = ", ".join(map(dtype_name, self.packing.scales))
            yield f"{self.name}{SCALE} is {scale.dtype}; expected one of {accepted}"
        if self.sizes is not None and (
            self.sizes.shape != (2,) or self.sizes.dtype not in (torch.int32, torch.int64)
        ):
            found = f"{self.sizes.dtype} {self.sizes.shape}"
            yield f"{self.name}{SHAPE} is {found}; expected two integers"

    def values(self, dtype: torch.dtype) -> LazyTensor:
        """The weight; reading a part reads only the groups that it lies in."""
        scale, sizes = self.scale, self.sizes
        assert scale is not None

        def load(session: ReadSession) -> Tensor:
            self._check_sizes(session)
            stored = self.packed.load(session), scale.load(session)
            return dequantise(self.packing, *stored, dtype, self.name)

        def part(dim: int, start: int, length: int) -> LazyTensor:
            group = GROUP if dim else 1
            first, end = start // group, -(-(start + length) // group)
            word = GROUP // (self.packed.dtype.itemsize * 2) if dim else 1
            inner = PackedWeight(
                name=self.name,
                packed=self.packed.narrow(dim, first * word, (end - first) * word),
                scale=scale.narrow(dim, first, end - first),
            ).values(dtype)
            if (first * group, end * group) == (start, start + length):
                return inner
            # Without its own parts, which would be the same groups again.
            whole = LazyTensor(inner.shape, dtype, inner.load, inner.leaves, inner.peak)
            return whole.narrow(dim, start - first * group, length)

        leaves = self.packed.leaves | scale.leaves | (sizes.leaves if sizes else frozenset())
        nbytes = math.prod(self.shape) * dtype.itemsize
        peak = self.packed.peak + scale.peak + nbytes + _slab_bytes(self.shape)
        return LazyTensor(self.shape, dtype, load, leaves, peak, part)

    def rewritten(self, tensor: LazyTensor) -> QuantisedTensor:
        """Another weight in this format; groups that are equal in bfloat16 keep this one's bits."""
        key, scale = object(), self.scale
        assert scale is not None and tensor.shape == self.shape

        def results(session: ReadSession) -> tuple[Tensor, Tensor, QuantisationError]:
            def make() -> tuple[Tensor, Tensor, QuantisationError]:
                self._check_sizes(session)
                before = self.packed.load(session), scale.load(session)
                return quantise(self.packing, tensor.load(session), *before, self.name)

            return session.once(key, make)

        def one(like: LazyTensor, position: int, peak: int) -> LazyTensor:
            return LazyTensor(
                like.shape, like.dtype, lambda s: results(s)[position], tensor.leaves, peak
            )

        before = self.packed.peak + self.packed.nbytes + scale.peak
        peak = tensor.peak + before + _slab_bytes(self.shape)
        stored = {PACKED: one(self.packed, 0, peak), SCALE: one(scale, 1, scale.nbytes)}
        if self.sizes is not None:
            stored[SHAPE] = self.sizes
        return QuantisedTensor(stored, lambda session: results(session)[2])

    @property
    def _scale_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-1], self.shape[-1] // GROUP)

    def _check_sizes(self, session: ReadSession) -> None:
        if self.sizes is not None and tuple(self.sizes.load(session).tolist()) != self.shape:
            found = self.sizes.load(session).tolist()
            raise CheckpointError(f"{self.name}{SHAPE} says {found}; expected {list(self.shape)}")


def packed_weights(stored: Mapping[str, LazyTensor]) -> dict[str, PackedWeight]:
    """The four-bit weights among stored tensors, by the name of the weight."""
    names = [name.removesuffix(PACKED) for name in stored if name.endswith(f".weight{PACKED}")]
    return {
        name: PackedWeight(
            name=name,
            packed=stored[name + PACKED],
            scale=stored.get(name + SCALE),
            sizes=stored.get(name + SHAPE),
        )
        for name in names
    }


def unpacked(
    stored: Mapping[str, LazyTensor], dtype: torch.dtype, problems: list[str]
) -> dict[str, LazyTensor]:
    """Stored tensors with the values of four-bit weights in the place of what is stored of them.

    Args:
        stored: By name.
        dtype: Of the values, to which code times scale is rounded once.
        problems: Receives a line for everything that is wrong with shapes and dtypes.
    """
    result = dict(stored)
    for name, weight in packed_weights(stored).items():
        for suffix in (PACKED, SCALE, SHAPE):
            result.pop(name + suffix, None)
        found = list(weight.problems())
        if name in stored:
            found.append(f"{name} is stored as it is and in four bits")
        problems += found
        # A placeholder, so that its shape is still checked.
        result[name] = zeros(weight.shape, dtype) if found else weight.values(dtype)
    return result


def dequantise(
    packing: Packing, packed: Tensor, scale: Tensor, dtype: torch.dtype, name: str
) -> Tensor:
    """The values [M, N] of a four-bit weight.

    Args:
        packing: Its format.
        packed: Two codes in a byte, [M, N / 8] int32 or [M, N / 2] uint8.
        scale: [M, N/32].
        dtype: Of the result, to which code times scale is rounded once.
        name: Of the weight, for error messages.

    Raises:
        CheckpointError: If a scale is not a finite number, or ``dtype`` cannot hold a value.
    """
    scales = _scales(scale, name)
    largest = max(map(abs, packing.values))
    may_overflow = scales.numel() and scales.abs().max() * largest > torch.finfo(dtype).max
    rows, columns = packed.shape[0], scale.shape[1] * GROUP
    result = torch.empty((rows, columns), dtype=dtype)
    for part in _slabs(rows, columns):
        values = _scaled(packing, packed[part], scales[part])
        result[part] = values
        if may_overflow and not result[part].isfinite().all():
            raise CheckpointError(
                f"{name} has values up to {values.abs().max():g}, which {dtype} cannot hold"
            )
    return result


def quantise(
    packing: Packing, tensor: Tensor, packed: Tensor, scale: Tensor, name: str
) -> tuple[Tensor, Tensor, QuantisationError]:
    """A matrix in the format of another one, whose bits stay in groups of equal values.

    Other groups get the scales of compressed-tensors' min-max observer: the largest magnitude is
    7.5 times it in INT4; in MXFP4 it is the power of two with which the magnitude is in [3.5, 7).

    Args:
        packing: The format.
        tensor: [M, N], floating.
        packed: Codes of the other one, as :func:`dequantise` takes them.
        scale: Its scales.
        name: Of the weight, for error messages.

    Returns:
        Codes, scales, and the error.

    Raises:
        CheckpointError: If a value is not a finite number.
    """
    codes, new_scale = packed.clone(), scale.clone()
    scales = _scales(scale, name)
    largest = worst = squares = squared_errors = 0.0
    for part in _slabs(*tensor.shape):
        values = tensor[part].float()
        # NaN is larger than any number here.
        largest = max(largest_here := values.abs().max().item(), largest)
        if not math.isfinite(largest_here):
            raise CheckpointError(
                f"{name} holds values that are not finite numbers; it cannot be quantised"
            )
        squares += values.norm().item() ** 2
        same = _scaled(packing, packed[part], scales[part]).bfloat16() == tensor[part].bfloat16()
        kept = same.view(len(values), -1, GROUP).all(-1)
        if kept.all():
            continue
        bits = _bits(scale)
        fresh = _fresh_scales(packing, values, scale.dtype).view(bits)
        new_scale[part] = torch.where(kept, scale[part].view(bits), fresh).view(scale.dtype)
        used = _scales(new_scale[part], name)
        keep = kept.repeat_interleave(GROUP // 2, dim=1)
        old = packed[part].contiguous().view(torch.uint8)
        codes[part] = torch.where(keep, old, _encode(packing, values, used)).view(packing.dtype)
        difference = _scaled(packing, codes[part], used).sub_(values).masked_fill_(same, 0)
        worst = max(worst, difference.abs().max().item())
        squared_errors += difference.norm().item() ** 2
    rms = math.sqrt(squared_errors / squares) if squares else 0.0
    return codes, new_scale, QuantisationError(worst / largest if largest else 0.0, rms)


def _slabs(rows: int, columns: int) -> Iterator[slice]:
    """Rows that are converted together."""
    step = max(1, _SLAB // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _slab_bytes(shape: tuple[int, ...]) -> int:
    return min(math.prod(shape), max(_SLAB, shape[1])) * _SLAB_BYTES


def _scales(stored: Tensor, name: str) -> Tensor:
    """Scales as float32; stored bytes are e8m0."""
    if stored.dtype == torch.uint8:
        stored = stored.view(torch.float8_e8m0fnu)
    scales = stored.float()
    if not scales.isfinite().all():
        raise CheckpointError(f"{name}{SCALE} holds scales that are not finite numbers")
    return scales


@functools.cache
def _pairs(packing: Packing) -> Tensor:
    """For each byte, its two codes' values in bfloat16, which are exact, as one int32."""
    codes = torch.arange(256)
    values = torch.tensor(packing.values, dtype=torch.bfloat16)
    return torch.stack((values[codes & 15], values[codes >> 4]), dim=1).view(torch.int32)[:, 0]


def _scaled(packing: Packing, packed: Tensor, scales: Tensor) -> Tensor:
    """Values in float32."""
    codes = packed.contiguous().view(torch.uint8)
    units = _pairs(packing).index_select(0, codes.flatten().int()).view(torch.bfloat16)
    return (units.view(*scales.shape, GROUP) * scales[..., None]).flatten(1)


def _fresh_scales(packing: Packing, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales [M, N/32] of groups, as they are stored."""
    largest = values.view(len(values), -1, GROUP).abs().amax(-1)
    if packing is INT4:
        scales = largest / 7.5
        return torch.where(largest > 0, scales, 1.0).to(dtype).clamp(min=torch.finfo(dtype).tiny)
    mantissa, exponent = torch.frexp(largest)
    steps = exponent - 3 + (mantissa >= 0.875).int()
    # Of zeros alone, one.
    steps = torch.where(largest > 0, steps, 0)
    return (steps + 127).clamp(0, 254).to(torch.uint8).view(dtype)


def _encode(packing: Packing, values: Tensor, scales: Tensor) -> Tensor:
    """Codes, two in a byte."""
    units = values.view(*scales.shape, GROUP) / scales[..., None]
    if packing is INT4:
        codes = units.round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    else:
        # Steps are 1/2 up to 2, 1 up to 4, and 2 up to 6: of the three, the coarsest that fits is
        # the smallest code.
        size = units.abs()
        codes = torch.minimum((size * 2).round_(), size.round() + 2)
        codes = torch.minimum(codes, (size / 2).round_() + 4).clamp_(max=7).to(torch.uint8)
        codes |= units.signbit().to(torch.uint8) << 3
    codes = codes.view(len(values), -1)
    return codes[:, ::2] | codes[:, 1::2] << 4


def _bits(tensor: Tensor) -> torch.dtype:
    """The integer dtype of a tensor's size, since not every operation knows e8m0."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
