"""A tensor that is stored in chunks, each a file of torch.save somewhere in a larger file."""

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
    """Where a tensor is.

    Attributes:
        name: Of the tensor.
        shape: Of the whole.
        dtype: Its dtype.
        grid: Along each dim, where chunks start; they cover the tensor exactly once.
        chunks: Offset of a chunk in the tensor -> its place.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    grid: tuple[Shape, ...]
    chunks: Mapping[Shape, FileSlice]

    def lazy(self, *index: int) -> LazyTensor:
        """The tensor, or what is at ``index`` of its first dims; parts of it are read alone."""
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
            CheckpointError: If its place holds something else.
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
class _Piece:
    """What a region has of one chunk: where the chunk is, and per dim (start in it, length)."""

    chunk: Shape
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class _Region:
    """A part of a chunked tensor.

    Attributes:
        tensor: It is a part of.
        start: Along each dim of the tensor.
        size: Likewise.
        dropped: The first dims, of size 1, that its result does not have.
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
        pieces = list(self._pieces())
        if len(pieces) == 1:
            result = self._load_piece(pieces[0], session)
        else:
            result = torch.empty(self.size, dtype=self.tensor.dtype)
            for piece in pieces:
                target = result
                for dim, (at, (inner, length)) in enumerate(zip(piece.chunk, piece.spans)):
                    target = target.narrow(dim, at + inner - self.start[dim], length)
                target.copy_(self._load_piece(piece, session))
        return result[(0,) * self.dropped]

    def _load_piece(self, piece: _Piece, session: ReadSession) -> Tensor:
        chunk = self.tensor.open_chunk(piece.chunk, session)
        for dim, span in enumerate(piece.spans):
            chunk = chunk.narrow(dim, *span)
        return chunk.load(session)

    def _pieces(self) -> Iterator[_Piece]:
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
            yield _Piece(tuple(at for at, _ in cell), tuple(span for _, span in cell))

    def _peak(self) -> int:
        """Bytes that are mapped, beside those of the result if it is put together."""
        itemsize, mapped = self.tensor.dtype.itemsize, []
        for piece in self._pieces():
            whole = self.tensor.chunk_size(piece.chunk)
            last = sum(
                (length - 1) * math.prod(whole[dim + 1 :])
                for dim, (_, length) in enumerate(piece.spans)
            )
            mapped.append((last + 1) * itemsize)
        together = math.prod(self.size) * itemsize if len(mapped) > 1 else 0
        return together + max(mapped)
