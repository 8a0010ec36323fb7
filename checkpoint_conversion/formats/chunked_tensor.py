"""A tensor that is stored in chunks, each in ``torch.save``'s format within a larger file."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.file_slice import FileSlice
from checkpoint_conversion.formats.pt_file import PtFile, open_pt
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ChunkedTensor:
    """The chunks of a tensor and their places.

    Attributes:
        name: Name of the tensor.
        shape: Shape of the whole tensor.
        dtype: Dtype of the tensor.
        grid: Start positions of the chunks along each dim; chunks tile the tensor exactly once.
        chunks: Offset of a chunk in the tensor -> its place in a file.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    grid: tuple[Shape, ...]
    chunks: Mapping[Shape, FileSlice]

    def lazy(self, *index: int) -> LazyTensor:
        """The tensor, or its slice at ``index`` of the first dims; only needed chunks are read."""
        start = (*index, *(0 for _ in self.shape[len(index) :]))
        size = (*(1 for _ in index), *self.shape[len(index) :])
        return _Region(self, start, size, len(index)).lazy()

    def chunk_size(self, offset: Shape) -> Shape:
        """Shape of the chunk at ``offset``."""
        size = []
        for starts, whole, at in zip(self.grid, self.shape, offset):
            after = bisect.bisect_right(starts, at)
            size.append((starts[after] if after < len(starts) else whole) - at)
        return tuple(size)

    def open_chunk(self, offset: Shape, session: ReadSession) -> LazyTensor:
        """The chunk at ``offset``.

        Raises:
            CheckpointError: If there is no tensor of this shape and dtype in its place.
        """
        place = self.chunks[offset]

        def make() -> contextlib.AbstractContextManager[PtFile]:
            return contextlib.nullcontext(open_pt(place))

        try:
            file = session.open(place, make)
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
class _Overlap:
    """The overlap of a region and a chunk: the chunk's offset, per dim (start in it, length)."""

    chunk: Shape
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class _Region:
    """A rectangular part of a chunked tensor.

    Attributes:
        tensor: The whole tensor.
        start: First index along each dim.
        size: Length along each dim.
        dropped: Number of leading dims, of size 1, that are dropped from the result.
    """

    tensor: ChunkedTensor
    start: Shape
    size: Shape
    dropped: int

    def lazy(self) -> LazyTensor:
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
        overlaps = list(self._overlaps())
        if len(overlaps) == 1:
            result = self._load_overlap(overlaps[0], session)
        else:
            result = torch.empty(self.size, dtype=self.tensor.dtype)
            for overlap in overlaps:
                target = result
                for dim, (at, (inner, length)) in enumerate(zip(overlap.chunk, overlap.spans)):
                    target = target.narrow(dim, at + inner - self.start[dim], length)
                target.copy_(self._load_overlap(overlap, session))
        return result[(0,) * self.dropped]

    def _load_overlap(self, overlap: _Overlap, session: ReadSession) -> Tensor:
        chunk = self.tensor.open_chunk(overlap.chunk, session)
        for dim, span in enumerate(overlap.spans):
            chunk = chunk.narrow(dim, *span)
        return chunk.load(session)

    def _overlaps(self) -> Iterator[_Overlap]:
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
        for cell in itertools.product(*along):
            yield _Overlap(tuple(at for at, _ in cell), tuple(span for _, span in cell))

    def _peak(self) -> int:
        """Bytes mapped from the largest chunk, plus the result if it is assembled of several."""
        itemsize, mapped = self.tensor.dtype.itemsize, []
        for overlap in self._overlaps():
            whole = self.tensor.chunk_size(overlap.chunk)
            last = sum(
                (length - 1) * math.prod(whole[dim + 1 :])
                for dim, (_, length) in enumerate(overlap.spans)
            )
            mapped.append((last + 1) * itemsize)
        together = math.prod(self.size) * itemsize if len(mapped) > 1 else 0
        return together + max(mapped)
