"""Comparing lazy tensors: with each other, and with what a manifest recorded of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from checkpoint_conversion.config_fields import dtype_name
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession
from checkpoint_conversion.manifest import Manifest, RunningChecksum, TensorRecord

# Elements that are read at a time (where the file can be read in parts), and compared at a time.
_SLAB, _BLOCK = 4 << 20, 1 << 20
# Bytes per element of a comparison's temporaries, for each of the two tensors: float64, masks.
_WORK = 4 * 8


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """Difference of two tensors of the same shape.

    Attributes:
        name: Name of the tensors.
        dtypes: Dtypes in A and B.
        max_abs: Largest |a - b| where both are finite.
        max_rel: The same, relative to the largest finite |a| of the whole tensor.
        not_finite: Elements that differ and of which at least one is infinite or no number.
        rounded: Where the dtypes differ: whether the values are equal after rounding the wider
            dtype to the narrower one.
    """

    name: str
    dtypes: tuple[str, str]
    max_abs: float
    max_rel: float
    not_finite: int
    rounded: bool | None


@dataclass(frozen=True)
class TensorComparison:
    """Checksums of two tensors; ``difference`` is None if their dtypes and bits are the same."""

    checksums: tuple[str, str]
    difference: TensorDifference | None


def compare_tensors(name: str, a: LazyTensor, b: LazyTensor) -> TensorComparison:
    """Read two tensors of the same shape and compare them, again if their bits differ."""
    assert a.shape == b.shape
    checksums = checksum(a), checksum(b)
    if a.dtype == b.dtype and checksums[0] == checksums[1]:
        return TensorComparison(checksums, None)
    return TensorComparison(checksums, _difference(name, a, b))


def checksum(tensor: LazyTensor) -> str:
    """Checksum of a tensor's values."""
    running = RunningChecksum()
    for values in _slabs(tensor):
        running.update(values)
    return running.hexdigest()


def peak_of_slab(tensor: LazyTensor) -> int:
    """Memory in bytes that is needed while a slab is compared."""
    read = tensor.peak if tensor.part is None else tensor.narrow(0, 0, _rows(tensor)).peak
    return read + _WORK * min(_BLOCK, math.prod(tensor.shape))


def _slabs(tensor: LazyTensor) -> Iterator[Tensor]:
    """The values in slabs of rows; each is read on its own if the file can be read in parts."""
    rows = _rows(tensor)
    if tensor.part is None:
        with ReadSession() as session:
            yield from tensor.load(session).split(rows)
        return
    for start in range(0, tensor.shape[0], rows):
        with ReadSession() as session:
            yield tensor.narrow(0, start, min(rows, tensor.shape[0] - start)).load(session)


def _blocks(a: LazyTensor, b: LazyTensor) -> Iterator[tuple[Tensor, Tensor]]:
    # Rows of one shape make the same slabs.
    for slab_a, slab_b in zip(_slabs(a), _slabs(b), strict=True):
        yield from zip(slab_a.flatten().split(_BLOCK), slab_b.flatten().split(_BLOCK))


def _rows(tensor: LazyTensor) -> int:
    width = math.prod(tensor.shape[1:])
    return min(tensor.shape[0], max(1, _SLAB // max(1, width)))


def _difference(name: str, a: LazyTensor, b: LazyTensor) -> TensorDifference:
    narrow = min(b.dtype, a.dtype, key=lambda dtype: dtype.itemsize)
    max_abs = largest = 0.0
    not_finite, rounded = 0, True
    for block_a, block_b in _blocks(a, b):
        x, y = block_a.double(), block_b.double()
        apart = (x - y).abs().masked_fill_(_same(x, y), 0)
        finite = apart.isfinite()
        not_finite += int((~finite).sum())
        max_abs = max(max_abs, float(apart.masked_fill_(~finite, 0).max()))
        largest = max(largest, float(x.masked_fill(~x.isfinite(), 0).abs().max()))
        rounded = rounded and bool(_same(block_a.to(narrow), block_b.to(narrow)).all())
    return TensorDifference(
        name=name,
        dtypes=(dtype_name(a.dtype), dtype_name(b.dtype)),
        max_abs=max_abs,
        # Where A is zero everywhere, the absolute error.
        max_rel=max_abs / (largest or 1.0),
        not_finite=not_finite,
        rounded=rounded if a.dtype != b.dtype else None,
    )


def _same(x: Tensor, y: Tensor) -> Tensor:
    """Mask of elements that are equal, or NaN in both."""
    return (x == y) | (x.isnan() & y.isnan())


@dataclass(frozen=True, kw_only=True)
class ManifestCheck:
    """The result of comparing a checkpoint with its manifest.

    Attributes:
        records: Number of tensors and blocks that the manifest lists.
        problems: Every difference from the manifest, one line each.
    """

    records: int
    problems: tuple[str, ...]

    @property
    def matches(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


class ManifestComparison:
    """Compares what a checkpoint stores with its manifest: headers at once, values on demand.

    Args:
        manifest: The checkpoint's manifest.
        stored: The checkpoint's tensors, by stored name.

    Attributes:
        blocks: Records whose headers agree, each with the stored tensor or block of it.
    """

    def __init__(self, manifest: Manifest, stored: Mapping[str, LazyTensor]) -> None:
        recorded: dict[str, list[TensorRecord]] = {}
        for record in manifest.tensors:
            recorded.setdefault(record.key, []).append(record)
        self._records = len(manifest.tensors)
        self._problems = [
            f"{key} is stored, but not in the manifest" for key in stored.keys() - recorded.keys()
        ]
        self.blocks: list[tuple[TensorRecord, LazyTensor]] = []
        for key, records in recorded.items():
            if key in stored:
                self._compare_headers(records, stored[key])
            else:
                self._problems.append(f"{key} is in the manifest, but not stored")

    def compare_values(self, record: TensorRecord, tensor: LazyTensor) -> None:
        """Compare the checksum of one of the ``blocks`` with its record."""
        found = checksum(tensor)
        if found != record.checksum:
            self._problems.append(
                f"{record.place} has checksum {found}; the manifest has {record.checksum}"
            )

    def result(self) -> ManifestCheck:
        """All differences that have been found."""
        return ManifestCheck(records=self._records, problems=tuple(sorted(self._problems)))

    def _compare_headers(self, records: list[TensorRecord], tensor: LazyTensor) -> None:
        dtype = dtype_name(tensor.dtype)
        for record in records:
            block = _block(record, tensor)
            if dtype != record.dtype:
                self._problems.append(f"{record.key} is {dtype}; the manifest has {record.dtype}")
            elif block is None:
                at = "" if record.offset is None else f" at {list(record.offset)}"
                self._problems.append(
                    f"{record.key} has shape {tensor.shape}; the manifest has {record.shape}{at}"
                )
            else:
                self.blocks.append((record, block))
        # Blocks at different offsets whose sizes add up to the tensor's cover the tensor.
        sizes = {record.offset: math.prod(record.shape) for record in records}
        if len(sizes) < len(records) or sum(sizes.values()) != math.prod(tensor.shape):
            self._problems.append(
                f"{records[0].key} has shape {tensor.shape}, which the manifest's blocks do not "
                "make up"
            )


def _block(record: TensorRecord, tensor: LazyTensor) -> LazyTensor | None:
    """The tensor, or block of it, that a record describes; None if it does not lie within it."""
    if record.offset is None:
        return tensor if record.shape == tensor.shape else None
    if not len(record.offset) == len(record.shape) == len(tensor.shape):
        return None
    for dim, (start, size) in enumerate(zip(record.offset, record.shape)):
        if start + size > tensor.shape[dim]:
            return None
        tensor = tensor.narrow(dim, start, size)
    return tensor
