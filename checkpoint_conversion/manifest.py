"""``conversion_manifest.json``: what a conversion wrote, with a checksum of every tensor."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import xxhash
from torch import Tensor

from checkpoint_conversion.checkpoint_folder import MANIFEST as NAME
from checkpoint_conversion.checkpoint_folder import weights_folder
from checkpoint_conversion.config_fields import dtype_name
from checkpoint_conversion.errors import CheckpointError

FORMAT_VERSION = 1
ALGORITHM = "xxh3_128"
# Number of values that are hashed and counted at a time.
_CHUNK = 1 << 20
# Dtypes without infinity: bit pattern of NaN, and the mask to compare under.
_NO_NUMBER = {torch.float8_e4m3fn: (0x7F, 0x7F), torch.float8_e8m0fnu: (0xFF, 0xFF)}
# A model of 100 000 tensors needs 25 MB.
_MAX_BYTES = 256 << 20
# Fields of a tensor that manifests of earlier versions lack.
_ADDED = {"not_finite"}
_CHECKSUM = re.compile(r"[0-9a-f]{32}")


class RunningChecksum:
    """XXH3 (128 bits) of a tensor's little-endian bytes, which are added in consecutive parts.

    NaN and infinite values are counted in the same pass, while they are in the processor's cache.

    Attributes:
        nan: Number of NaN values so far.
        infinite: Number of infinite values so far.
    """

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self.nan = self.infinite = 0

    def update(self, tensor: Tensor) -> None:
        """Add the next values."""
        if not tensor.numel():
            return
        for values in tensor.detach().contiguous().flatten().split(_CHUNK):
            self._hash.update(values.view(torch.uint8).numpy().data)
            self._count(values)

    def hexdigest(self) -> str:
        """Of all values so far, in hexadecimal."""
        return self._hash.hexdigest()

    def not_finite(self) -> dict[str, int]:
        """Numbers of ``nan`` and ``infinite`` values so far; empty if all are finite."""
        counts = {"nan": self.nan, "infinite": self.infinite}
        return {kind: count for kind, count in counts.items() if count}

    def _count(self, values: Tensor) -> None:
        if values.dtype in _NO_NUMBER:
            pattern, mask = _NO_NUMBER[values.dtype]
            self.nan += int((values.view(torch.uint8) & mask).eq(pattern).sum())
        elif values.is_floating_point() and not _all_finite(values):
            self.nan += int(values.isnan().sum())
            self.infinite += int(values.isinf().sum())


def _all_finite(values: Tensor) -> bool:
    """Whether all values are finite: an infinity or NaN is the largest or smallest value."""
    return bool(torch.stack(torch.aminmax(values)).isfinite().all())


@dataclass(frozen=True)
class TensorRecord:
    """A tensor, or a block of a tensor, that was written.

    Attributes:
        key: Its name in the target.
        offset: Position of a block in its tensor; None for a whole tensor.
        shape: Shape of the tensor or block.
        dtype: Its dtype, e.g. ``"bfloat16"``.
        checksum: Checksum of its bytes.
        file: The file that holds it, relative to the target.
        fp8_error: Quantisation error, if it was quantised, to whatever.
        not_finite: Counts of values that are ``nan`` and ``infinite``; None if there are none.
    """

    key: str
    offset: tuple[int, ...] | None
    shape: tuple[int, ...]
    dtype: str
    checksum: str
    file: str
    fp8_error: dict[str, float] | None = None
    not_finite: dict[str, int] | None = None

    @property
    def place(self) -> str:
        """Name of the tensor, with the offset of the block if it is one."""
        return self.key if self.offset is None else f"{self.key} at {list(self.offset)}"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Record of a conversion.

    Attributes:
        tool_version: Version of this package.
        source: ``format``, ``layout`` and ``folder`` (its name) of the source.
        target: ``format``, ``layout`` and ``options`` of the target.
        left_out: Entries of the source that the target does not have: name -> reason.
        files: Sizes in bytes of the files with weights, by path relative to the target.
        tensors: Every tensor and block, in the order of the plan.
        conversion: Checksum of :func:`planning.fingerprint_of`: equal for conversions with the same
            source files and options.
        fp8_errors: Largest errors of the quantised tensors; None if there are none.
        algorithm: Name of the checksum algorithm.
        format_version: Version of this file's format.
    """

    tool_version: str
    source: dict
    target: dict
    left_out: dict[str, str]
    files: dict[str, int]
    tensors: tuple[TensorRecord, ...]
    conversion: str
    fp8_errors: dict | None = None
    algorithm: str = field(default=ALGORITHM)
    format_version: int = FORMAT_VERSION


def tensor_record(
    key: str, values: Tensor, file: str, offset: tuple[int, ...] | None = None, **fields: Any
) -> TensorRecord:
    """The record of a tensor or block that is written.

    Args:
        key: Name in the target.
        values: The values as written.
        file: The file that holds them, relative to the target.
        offset: Position of a block in the whole tensor; None for a whole tensor.
        fields: Further fields of the record.
    """
    running = RunningChecksum()
    running.update(values)
    return TensorRecord(
        key,
        offset,
        tuple(values.shape),
        dtype_name(values.dtype),
        running.hexdigest(),
        file,
        not_finite=running.not_finite() or None,
        **fields,
    )


def read_record(document: Any) -> TensorRecord:
    """A record that was stored as JSON.

    Raises:
        CheckpointError: If it is no record, saying which fields are wrong.
    """
    problems = _record_problems(document)
    if problems:
        raise CheckpointError("; ".join(problems))
    offset = document["offset"]
    shape = tuple(document["shape"])
    return TensorRecord(
        **{**document, "shape": shape, "offset": None if offset is None else tuple(offset)}
    )


def write_manifest(manifest: Manifest, target: Path) -> Path:
    """Write a manifest beside the weights of ``target``; returns the file's path."""
    path = weights_folder(target) / NAME
    with path.open("w") as file:
        json.dump(asdict(manifest), file, separators=(",", ":"))
    return path


def find_manifest(target: Path) -> Path | None:
    """The manifest of a checkpoint, if it has one."""
    path = weights_folder(target) / NAME
    return path if path.is_file() else None


def read_manifest(path: Path) -> Manifest:
    """Read a manifest from an untrusted file, checking every field.

    Raises:
        CheckpointError: If it is no manifest, listing what is wrong.
    """
    if path.stat().st_size > _MAX_BYTES:
        raise CheckpointError(f"{path} has more than {_MAX_BYTES} bytes; no manifest is so large")
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    problems = _problems(document)
    if problems:
        raise CheckpointError(f"{path} is no manifest:", problems[:20])
    records = tuple(map(read_record, document.pop("tensors")))
    return Manifest(tensors=records, **document)


_FIELDS: dict[str, type | tuple[type, ...]] = {
    "tool_version": str,
    "source": dict,
    "target": dict,
    "left_out": dict,
    "files": dict,
    "tensors": list,
    "conversion": str,
    "fp8_errors": (dict, type(None)),
    "algorithm": str,
    "format_version": int,
}


def _problems(document: Any) -> list[str]:
    if not isinstance(document, dict):
        return ["it holds no object"]
    if document.get("format_version") != FORMAT_VERSION:
        found = document.get("format_version")
        return [f"format_version is {found!r:.40}; this version reads {FORMAT_VERSION}"]
    problems = [f"{name} is missing" for name in _FIELDS.keys() - document.keys()]
    problems += [f"{name!r:.80} is unknown" for name in document.keys() - _FIELDS.keys()]
    for name in _FIELDS.keys() & document.keys():
        if not isinstance(document[name], _FIELDS[name]):
            problems.append(f"{name} is of type {type(document[name]).__name__}")
    if problems:
        return sorted(problems)
    if document["algorithm"] != ALGORITHM:
        problems.append(f"algorithm is {document['algorithm']!r:.40}; only {ALGORITHM} is known")
    if not all(isinstance(reason, str) for reason in document["left_out"].values()):
        problems.append("left_out holds something that is no text")
    if not all(map(_is_inside, document["files"])) or not _are_sizes([*document["files"].values()]):
        problems.append("files holds something that is no file inside, or no size")
    for number, record in enumerate(document["tensors"]):
        problems += [f"tensors[{number}]: {problem}" for problem in _record_problems(record)]
    return problems


def _record_problems(record: Any) -> list[str]:
    fields = TensorRecord.__annotations__.keys()
    if not isinstance(record, dict) or record.keys() | _ADDED != fields:
        return ["its fields are not those of a tensor"]
    not_finite = record.get("not_finite")
    checks = {
        "key": isinstance(record["key"], str),
        "offset": record["offset"] is None or _are_sizes(record["offset"]),
        "shape": _are_sizes(record["shape"]),
        "dtype": isinstance(record["dtype"], str),
        "checksum": isinstance(record["checksum"], str)
        and _CHECKSUM.fullmatch(record["checksum"]) is not None,
        "file": _is_inside(record["file"]),
        "fp8_error": record["fp8_error"] is None or _are_numbers(record["fp8_error"]),
        "not_finite": not_finite is None or _are_numbers(not_finite),
    }
    return [f"{name} is {record.get(name)!r:.80}" for name, good in checks.items() if not good]


def _are_sizes(value: Any) -> bool:
    # bool is an int, too.
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size < 2**63 for size in value
    )


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(type(v) in (int, float) for v in value.values())


def _is_inside(value: Any) -> bool:
    if not isinstance(value, str) or not value or "\0" in value or "\\" in value:
        return False
    path = PurePosixPath(value)
    return not path.is_absolute() and ".." not in path.parts
