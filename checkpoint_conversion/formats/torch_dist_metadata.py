"""What a distributed checkpoint stores and where, with every claim of its ``.metadata`` checked.

A tensor is stored in chunks, each in ``torch.save``'s format within a larger file.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import os
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorStorageMetadata,
)

from checkpoint_conversion.checkpoint_folder import METADATA, file_inside, name_problem, shown_name
from checkpoint_conversion.errors import CheckpointError, raise_problems
from checkpoint_conversion.formats.pickles import load_metadata
from checkpoint_conversion.formats.pt_file import FileSlice, PtFile, open_pt
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession

Shape = tuple[int, ...]
# Per dim, start and length of a part.
Spans = tuple[tuple[int, int], ...]
_MOST_DIMS = 8


@dataclass(frozen=True, eq=False)
class TiledTensor(ABC):
    """A tensor in chunks, wherever they are.

    Attributes:
        name: Name of the tensor.
        shape: Shape of the whole tensor.
        dtype: Dtype of the tensor.
        grid: Start positions of the chunks along each dim; chunks tile the tensor exactly once.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    grid: tuple[Shape, ...]

    @abstractmethod
    def load(
        self, overlaps: Sequence[Overlap], session: ReadSession
    ) -> Iterator[tuple[Overlap, Tensor]]:
        """The values of parts of chunks, each once, in any order."""

    def load_into(self, places: Mapping[Overlap, Tensor], session: ReadSession) -> None:
        """Set each place to the values of its part of a chunk."""
        for overlap, values in self.load([*places], session):
            places[overlap].copy_(values)

    def empty(self, shape: Shape) -> Tensor:
        """Room for values of this tensor, where :meth:`load` puts them."""
        return torch.empty(shape, dtype=self.dtype)

    def lazy(self, *index: int) -> LazyTensor:
        """The tensor, or its slice at ``index`` of the first dims; only needed chunks are read."""
        start = (*index, *(0 for _ in self.shape[len(index) :]))
        size = (*(1 for _ in index), *self.shape[len(index) :])
        return Region(self, start, size, len(index)).lazy()

    def chunk_size(self, offset: Shape) -> Shape:
        """Shape of the chunk at ``offset``."""
        size = []
        for starts, whole, at in zip(self.grid, self.shape, offset):
            after = bisect.bisect_right(starts, at)
            size.append((starts[after] if after < len(starts) else whole) - at)
        return tuple(size)


@dataclass(frozen=True, eq=False)
class ChunkedTensor(TiledTensor):
    """A tensor whose chunks are in files.

    Attributes:
        chunks: Offset of a chunk in the tensor -> its place in a file.
    """

    chunks: Mapping[Shape, FileSlice]

    def load(
        self, overlaps: Sequence[Overlap], session: ReadSession
    ) -> Iterator[tuple[Overlap, Tensor]]:
        """Read one after the other; see the base class."""
        for overlap in overlaps:
            chunk = self.open_chunk(overlap.chunk, session)
            for dim, span in enumerate(overlap.spans):
                chunk = chunk.narrow(dim, *span)
            yield overlap, chunk.load(session)

    def open_chunk(self, offset: Shape, session: ReadSession) -> LazyTensor:
        """The chunk at ``offset``.

        Raises:
            CheckpointError: If there is no tensor of this shape and dtype in its place.
        """
        place = self.chunks[offset]
        try:
            file: PtFile = session.once(place, lambda: open_pt(place))
        except CheckpointError as error:
            raise CheckpointError(f"{self.name}: {error}") from None
        if not isinstance(file.content, Tensor):
            raise CheckpointError(f"{self.name}: {place} holds no tensor")
        try:
            stored = file.stored(file.content)
        except CheckpointError as error:
            raise CheckpointError(f"{self.name}: {place} {error}") from None
        size = self.chunk_size(offset)
        if stored.shape != size or stored.dtype != self.dtype:
            raise CheckpointError(
                f"{self.name}: {place} holds {stored.dtype} of shape {stored.shape}; the metadata "
                f"says {self.dtype} of shape {size}"
            )
        return stored.lazy(self.name)


@dataclass(frozen=True, eq=False)
class Overlap:
    """The overlap of a region and a chunk: the chunk's offset, per dim (start in it, length)."""

    chunk: Shape
    spans: Spans

    def of(self, chunk: Tensor) -> Tensor:
        """The part of the chunk's values."""
        return _narrowed(chunk, self.spans)


@dataclass(frozen=True, eq=False)
class Region:
    """A rectangular part of a chunked tensor.

    Attributes:
        tensor: The whole tensor.
        start: First index along each dim.
        size: Length along each dim.
        dropped: Number of leading dims, of size 1, that are dropped from the result.
    """

    tensor: TiledTensor
    start: Shape
    size: Shape
    dropped: int

    def lazy(self) -> LazyTensor:
        """The part as a tensor of its own."""
        tensor = self.tensor
        leaves = frozenset({tensor.name})
        shape = self.size[self.dropped :]
        return LazyTensor(shape, tensor.dtype, self._load, leaves, self._peak(), self._part)

    def _part(self, dim: int, start: int, length: int) -> LazyTensor:
        dim += self.dropped
        starts, sizes = list(self.start), list(self.size)
        starts[dim] += start
        sizes[dim] = length
        return replace(self, start=tuple(starts), size=tuple(sizes)).lazy()

    def _load(self, session: ReadSession) -> Tensor:
        if len(self.overlaps) == 1:
            [(_, result)] = self.tensor.load(self.overlaps, session)
        else:
            result = self.tensor.empty(self.size)
            places = {overlap: _narrowed(result, self._place(overlap)) for overlap in self.overlaps}
            self.tensor.load_into(places, session)
        return result[(0,) * self.dropped]

    def _place(self, overlap: Overlap) -> Spans:
        """Where an overlap is in the region."""
        dims = zip(overlap.chunk, overlap.spans, self.start)
        return tuple((at + inner - start, length) for at, (inner, length), start in dims)

    @functools.cached_property
    def overlaps(self) -> Sequence[Overlap]:
        """Where it meets the chunks, each with the part of it that it covers."""
        along = []
        dims = zip(self.tensor.grid, self.tensor.shape, self.start, self.size)
        for starts, whole, start, size in dims:
            first, end = bisect.bisect_right(starts, start) - 1, start + size
            cells = []
            for at, after in zip(starts[first:], (*starts[first + 1 :], whole)):
                if at >= end:
                    break
                inner = max(start - at, 0)
                cells.append((at, (inner, min(after, end) - at - inner)))
            along.append(cells)
        return [
            Overlap(tuple(at for at, _ in cell), tuple(span for _, span in cell))
            for cell in itertools.product(*along)
        ]

    def _peak(self) -> int:
        """Bytes mapped from the largest chunk, plus the result if it is assembled of several."""
        itemsize, mapped = self.tensor.dtype.itemsize, []
        for overlap in self.overlaps:
            whole = self.tensor.chunk_size(overlap.chunk)
            last = sum(
                (length - 1) * math.prod(whole[dim + 1 :])
                for dim, (_, length) in enumerate(overlap.spans)
            )
            mapped.append((last + 1) * itemsize)
        together = math.prod(self.size) * itemsize if len(mapped) > 1 else 0
        return together + max(mapped)


def _narrowed(values: Tensor, spans: Spans) -> Tensor:
    for dim, (start, length) in enumerate(spans):
        if length != values.shape[dim]:
            values = values.narrow(dim, start, length)
    return values


class Storage:
    """The tensors and objects of a distributed checkpoint.

    Args:
        folder: The folder of ``.metadata``.
        follow_links: Whether links may lead out of the folder.

    Attributes:
        tensors: Names of the tensors.
        objects: Names of everything else; each is stored as the bytes of ``torch.save``.

    Raises:
        CheckpointError: If the metadata cannot be read.
    """

    def __init__(self, folder: Path, follow_links: bool = False) -> None:
        self._folder, self._follow_links = folder, follow_links
        path = file_inside(folder, METADATA, follow_links=follow_links)
        metadata = load_metadata(path)
        entries, places = _field(metadata, "state_dict_metadata"), _field(metadata, "storage_data")
        if type(entries) is not dict or type(places) is not dict:
            raise CheckpointError(f"{path} does not say where tensors are stored")
        self._entries: dict[str, Any] = entries
        # Name -> offset of the chunk, None for an object -> storage info.
        self._places: dict[str, dict[Shape | None, Any]] = defaultdict(dict)
        self._files: dict[str, tuple[Path, int]] = {}
        self._used: dict[Path, list[tuple[int, int, str]]] = defaultdict(list)
        self._check_names(places)
        kinds = {name: type(entry) for name, entry in entries.items()}
        self.tensors = [name for name, kind in kinds.items() if kind is TensorStorageMetadata]
        self.objects = [name for name, kind in kinds.items() if kind is BytesStorageMetadata]

    def nbytes(self, name: str) -> int:
        """Size of a tensor or object in the files, as the metadata claims."""
        lengths = (_field(info, "length") for info in self._places[name].values())
        return sum(length for length in lengths if type(length) is int and length > 0)

    def object(self, name: str) -> FileSlice:
        """The place of an object.

        Raises:
            CheckpointError: If there is no such place in the files.
        """
        problems: list[str] = []
        place = self._place(name, None, 1, problems)
        if place is None:
            raise CheckpointError(f"{self._folder} cannot be read:", problems)
        return place

    def read(self, names: Collection[str]) -> dict[str, ChunkedTensor]:
        """The tensors with the places of their chunks.

        Raises:
            CheckpointError: Listing the missing files; or else every contradiction: chunks that do
                not tile their tensor, places outside a file, places that overlap.
        """
        self._refuse_missing_files(names)
        problems: list[str] = []
        found = {name: self._tensor(name, problems) for name in names}
        problems += self._overlaps()
        raise_problems(f"{self._folder} contradicts itself:", problems)
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _refuse_missing_files(self, names: Collection[str]) -> None:
        """Report each missing file in one line, however many tensors it held."""
        tensors: dict[str, set[str]] = defaultdict(set)
        for name in names:
            for info in self._places[name].values():
                file = _field(info, "relative_path")
                # Names that lead out of the folder are refused later, with their tensor.
                if type(file) is str and name_problem(file) is None:
                    tensors[file].add(name)
        missing = [file for file in sorted(tensors) if not os.path.lexists(self._folder / file)]
        if missing:
            raise CheckpointError(
                f"{self._folder} is incomplete: {len(missing)} of the {len(tensors)} files that "
                f"{METADATA} names are missing:",
                [
                    f"{file}, with values of {len(tensors[file])} tensors such as "
                    f"{min(tensors[file])}"
                    for file in missing
                ],
            )

    def _check_names(self, places: dict[Any, Any]) -> None:
        problems = []
        for index, info in places.items():
            name, offset = _field(index, "fqn"), _field(index, "offset")
            if type(name) is str and name in self._entries:
                self._places[name][_sizes(offset)] = info
            else:
                problems.append(f"{_shown(name)} is stored, but not described")
        for name, entry in self._entries.items():
            if type(name) is not str or shown_name(name) != name:
                problems.append(f"{_shown(name)} is no tensor's name")
            elif type(entry) not in (TensorStorageMetadata, BytesStorageMetadata):
                problems.append(f"{name} is neither a tensor nor an object")
        raise_problems(f"{self._folder / METADATA} cannot be used:", problems)

    def _tensor(self, name: str, problems: list[str]) -> ChunkedTensor | None:
        entry = self._entries[name]
        shape, dtype = _sizes(_field(entry, "size")), _field(_field(entry, "properties"), "dtype")
        chunks = _field(entry, "chunks")
        boxes = list(map(_box, chunks)) if type(chunks) is list else [None]
        if shape is None or not isinstance(dtype, torch.dtype) or None in boxes:
            problems.append(f"{name} has no shape, dtype or chunks")
            return None
        known = [box for box in boxes if box is not None]
        grid = tiling(shape, known)
        if grid is None:
            problems.append(f"{name} of shape {shape} is not tiled by its {len(known)} chunks")
            return None
        places = {}
        for offsets, sizes in known:
            place = self._place(name, offsets, math.prod(sizes) * dtype.itemsize, problems)
            if place is not None:
                places[offsets] = place
        return ChunkedTensor(name, shape, dtype, grid, places)

    def _place(
        self, name: str, offset: Shape | None, least: int, problems: list[str]
    ) -> FileSlice | None:
        """The place of a chunk or object, which must have at least ``least`` bytes."""
        what = name if offset is None else f"{name} at {offset}"
        info = self._places[name].get(offset)
        file, start, length = (_field(info, f) for f in ("relative_path", "offset", "length"))
        if not isinstance(info, _StorageInfo) or type(file) is not str:
            problems.append(f"{what} is not stored")
            return None
        if _field(info, "transform_descriptors"):
            problems.append(f"{what} is compressed or transformed, which is not supported")
            return None
        try:
            path, size = self._file(file)
        except CheckpointError as error:
            problems.append(f"{what}: {error}")
            return None
        if type(start) is not int or type(length) is not int or not 0 <= start <= size - length:
            problems.append(f"{what} is not within {shown_name(file)}, which has {size} bytes")
            return None
        if length < least:
            problems.append(f"{what} needs {least} bytes; {length} are stored")
            return None
        self._used[path].append((start, start + length, what))
        return FileSlice(path, start, length)

    def _file(self, name: str) -> tuple[Path, int]:
        if name not in self._files:
            path = file_inside(self._folder, name, follow_links=self._follow_links)
            self._files[name] = path, path.stat().st_size
        return self._files[name]

    def _overlaps(self) -> Iterator[str]:
        for path, places in self._used.items():
            places.sort()
            for (_, end, first), (start, _, second) in zip(places, places[1:]):
                if start < end:
                    yield f"{first} and {second} are in the same place of {path.name}"


def _field(record: object, name: str) -> Any:
    """A field of an object of unknown type; None if it has no such field."""
    return getattr(record, name, None)


def _shown(name: object) -> str:
    return shown_name(name) if type(name) is str else f"a name of type {type(name).__name__}"


def _sizes(value: object) -> Shape | None:
    """Sizes or offsets from a file as integers; None if no tensor can have them."""
    if type(value) is not torch.Size or len(value) > _MOST_DIMS:
        return None
    return tuple(value) if all(0 <= size < 1 << 40 for size in value) else None


def _box(chunk: object) -> tuple[Shape, Shape] | None:
    """A chunk's offsets and sizes; None if it has none."""
    if type(chunk) is not ChunkStorageMetadata:
        return None
    offsets, sizes = _sizes(_field(chunk, "offsets")), _sizes(_field(chunk, "sizes"))
    return None if offsets is None or sizes is None else (offsets, sizes)


def tiling(shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> tuple[Shape, ...] | None:
    """Where chunks start along each dim; None unless they tile the tensor exactly once."""
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in boxes):
        return None
    grid = []
    for dim, size in enumerate(shape):
        end = 0
        intervals = sorted({(offsets[dim], sizes[dim]) for offsets, sizes in boxes})
        for start, length in intervals:
            if start != end or not length:
                return None
            end += length
        if end != size:
            return None
        grid.append(tuple(start for start, _ in intervals))
    distinct = {offsets for offsets, _ in boxes}
    cells = math.prod(len(starts) for starts in grid)
    return tuple(grid) if len(distinct) == len(boxes) == cells else None
