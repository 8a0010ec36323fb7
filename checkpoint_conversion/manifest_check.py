"""Whether a checkpoint still is what its manifest says: every stored tensor, read again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from checkpoint_conversion.config_fields import dtype_name
from checkpoint_conversion.lazy_tensor import LazyTensor
from checkpoint_conversion.manifest import Manifest, TensorRecord
from checkpoint_conversion.tensor_comparison import checksum


@dataclass(frozen=True, kw_only=True)
class ManifestCheck:
    """The result of comparing a checkpoint with its manifest.

    Attributes:
        records: Tensors, and blocks of tensors, that the manifest lists.
        problems: Everything that is not as it lists, one line each.
    """

    records: int
    problems: tuple[str, ...]

    @property
    def matches(self) -> bool:
        """Whether everything is as it was written."""
        return not self.problems


def header_problems(manifest: Manifest, stored: Mapping[str, LazyTensor]) -> Iterator[str]:
    """What the headers show to be different, one line each.

    Args:
        manifest: Of the checkpoint.
        stored: Its tensors, by the names they are stored by.
    """
    recorded: dict[str, list[TensorRecord]] = {}
    for record in manifest.tensors:
        recorded.setdefault(record.key, []).append(record)
    for key in stored.keys() - recorded.keys():
        yield f"{key} is stored, but not in the manifest"
    for key, records in recorded.items():
        if key not in stored:
            yield f"{key} is in the manifest, but not stored"
            continue
        tensor = stored[key]
        yield from (problem for r in records if (problem := _misfit(r, tensor)) is not None)
        # Blocks at different offsets, of the size of the whole together, are the whole.
        sizes = {record.offset: math.prod(record.shape) for record in records}
        if len(sizes) < len(records) or sum(sizes.values()) != math.prod(tensor.shape):
            yield f"{key} has shape {tensor.shape}, which the manifest's blocks do not make up"


def block(record: TensorRecord, stored: Mapping[str, LazyTensor]) -> LazyTensor:
    """The part of a stored tensor that a record is about; it must fit, by its header."""
    tensor = stored[record.key]
    for dim, start in enumerate(record.offset or ()):
        tensor = tensor.narrow(dim, start, record.shape[dim])
    return tensor


def changed_values(record: TensorRecord, tensor: LazyTensor) -> str | None:
    """What is wrong with the values of a record's tensor or block; None if nothing is."""
    found = checksum(tensor)
    if found == record.checksum:
        return None
    at = "" if record.offset is None else f" at {list(record.offset)}"
    return f"{record.key}{at} has checksum {found}; the manifest has {record.checksum}"


def fits(record: TensorRecord, stored: Mapping[str, LazyTensor]) -> bool:
    """Whether there is a tensor to compare with a record."""
    return record.key in stored and _misfit(record, stored[record.key]) is None


def _misfit(record: TensorRecord, tensor: LazyTensor) -> str | None:
    dtype = dtype_name(tensor.dtype)
    if dtype != record.dtype:
        return f"{record.key} is {dtype}; the manifest has {record.dtype}"
    if record.offset is None:
        inside = record.shape == tensor.shape
    else:
        inside = len(record.offset) == len(record.shape) == len(tensor.shape) and all(
            start + size <= whole
            for start, size, whole in zip(record.offset, record.shape, tensor.shape)
        )
    if inside:
        return None
    at = "" if record.offset is None else f" at {list(record.offset)}"
    return f"{record.key} has shape {tensor.shape}; the manifest has {record.shape}{at}"
