"""Tensors that are known by shape and dtype, and read when somebody needs their values.

A conversion is planned on lazy tensors, from the headers of the checkpoint alone; then each target
tensor is loaded, written and forgotten. What a lazy tensor is made of can be asked (``leaves``), so
that a plan can prove that it uses every tensor of its source.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from checkpoint_conversion.errors import CheckpointError

# Bytes of copies that are compared at a time.
_SLAB = 32 << 20


class ReadSession:
    """The files that are open while one part of a checkpoint is read, and what was made of them.

    Memory-mapped pages count as resident until their file is closed, so a session should be short.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}
        self._stack = contextlib.ExitStack()

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` made for ``key``, which is unique among all readers; once per session."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def open(self, key: Hashable, make: Callable[[], contextlib.AbstractContextManager]) -> Any:
        """As :meth:`once` for a context manager: entered now, and left when the session ends."""
        return self.once(key, lambda: self._stack.enter_context(make()))

    def __enter__(self) -> ReadSession:
        return self

    def __exit__(self, *error: object) -> None:
        self._made.clear()
        self._stack.close()


Narrow = Callable[[int, int, int], "LazyTensor"]


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor whose values are not there yet.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        load: Reads it. The result may share memory with a file: never write into it.
        leaves: Names of the stored tensors it is made of.
        peak: Bytes resident while it is being loaded, the result included.
        part: Reads only ``length`` entries from ``start`` along a dim, where the file can; without
            it the whole tensor is loaded and cut.
        whole: (tensor, dim, start) if this is a part of another tensor, so that neighbouring parts
            can be recognised.
        joined: (tensors, dim) if it is these, one after the other along a dim.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[ReadSession], Tensor]
    leaves: frozenset[str]
    peak: int
    part: Narrow | None = None
    whole: tuple[LazyTensor, int, int] | None = None
    joined: tuple[Sequence[LazyTensor], int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def copy_to(self, target: Tensor, session: ReadSession) -> None:
        """Set ``target`` to the values; those of joined tensors are loaded one at a time."""
        if self.joined is None:
            target.copy_(self.load(session))
            return
        tensors, dim = self.joined
        for tensor, place in zip(tensors, target.split([t.shape[dim] for t in tensors], dim)):
            tensor.copy_to(place, session)

    def narrow(self, dim: int, start: int, length: int) -> LazyTensor:
        """``length`` entries from ``start`` along ``dim``; the whole tensor is itself."""
        assert 0 <= start <= start + length <= self.shape[dim]
        if length == self.shape[dim]:
            return self
        origin = (self, dim, start)
        if self.part is not None:
            return replace(self.part(dim, start, length), whole=origin)
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return LazyTensor(
            shape,
            self.dtype,
            lambda session: self.load(session).narrow(dim, start, length),
            self.leaves,
            self.peak,
            whole=origin,
        )

    def split(self, sizes: Sequence[int], dim: int = 0) -> list[LazyTensor]:
        """Consecutive parts of the given sizes."""
        assert sum(sizes) == self.shape[dim]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [self.narrow(dim, start, size) for start, size in zip(starts, sizes)]

    def chunk(self, parts: int, dim: int = 0) -> list[LazyTensor]:
        """``parts`` equal parts."""
        assert self.shape[dim] % parts == 0
        return self.split([self.shape[dim] // parts] * parts, dim)

    def view(self, *shape: int) -> LazyTensor:
        """The same values in another shape."""
        assert math.prod(shape) == math.prod(self.shape)
        # A tensor that is not contiguous is copied, which `map` allows memory for.
        return self.map(lambda values: values.reshape(shape), shape=shape)

    def map(
        self,
        function: Callable[[Tensor], Tensor],
        *,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> LazyTensor:
        """``function`` of the values; says what shape and dtype it makes, if it changes them."""
        shape = self.shape if shape is None else shape
        dtype = self.dtype if dtype is None else dtype
        peak = self.peak + math.prod(shape) * dtype.itemsize
        return LazyTensor(
            shape, dtype, lambda session: function(self.load(session)), self.leaves, peak
        )

    def to(self, dtype: torch.dtype) -> LazyTensor:
        """The values rounded to ``dtype``; itself if they have it already."""
        if dtype == self.dtype:
            return self
        return self.map(lambda values: values.to(dtype), dtype=dtype)


def concat(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    """Tensors one after the other; all parts of one tensor in order are that tensor again."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    assert all(t.dtype == first.dtype for t in tensors)
    assert all(
        t.shape[:dim] == first.shape[:dim] and t.shape[dim + 1 :] == first.shape[dim + 1 :]
        for t in tensors
    )
    joined = _rejoined(tensors, dim)
    if joined is not None:
        return joined
    shape = (*first.shape[:dim], sum(t.shape[dim] for t in tensors), *first.shape[dim + 1 :])
    nbytes = math.prod(shape) * first.dtype.itemsize

    def load(session: ReadSession) -> Tensor:
        values = first.load(session)
        result = torch.empty(shape, dtype=first.dtype, device=values.device)
        targets = result.split([t.shape[dim] for t in tensors], dim)
        targets[0].copy_(values)
        del values
        for part, target in zip(tensors[1:], targets[1:]):
            part.copy_to(target, session)
        return result

    def part(along: int, start: int, length: int) -> LazyTensor:
        if along == dim:
            return concat(_overlapping(tensors, dim, start, length), dim)
        return concat([t.narrow(along, start, length) for t in tensors], dim)

    leaves = frozenset().union(*(t.leaves for t in tensors))
    peak = nbytes + sum(t.peak for t in tensors)
    return LazyTensor(shape, first.dtype, load, leaves, peak, part, joined=(tensors, dim))


def _overlapping(
    tensors: Sequence[LazyTensor], dim: int, start: int, length: int
) -> list[LazyTensor]:
    """What tensors, one after the other, have of ``length`` entries from ``start``."""
    found, position = [], 0
    for tensor in tensors:
        size = tensor.shape[dim]
        first, end = max(start - position, 0), min(start + length - position, size)
        if first < end:
            found.append(tensor.narrow(dim, first, end - first))
        position += size
    return found or [tensors[0].narrow(dim, 0, 0)]


def _rejoined(tensors: Sequence[LazyTensor], dim: int) -> LazyTensor | None:
    if any(t.whole is None for t in tensors):
        return None
    wholes = [t.whole for t in tensors if t.whole is not None]
    source = wholes[0][0]
    position = 0
    for tensor, (whole, along, start) in zip(tensors, wholes):
        if whole is not source or along != dim or start != position:
            return None
        position += tensor.shape[dim]
    return source if position == source.shape[dim] else None


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> LazyTensor:
    """Zeros, made of nothing; padding."""
    nbytes = math.prod(shape) * dtype.itemsize
    return LazyTensor(
        shape, dtype, lambda session: torch.zeros(shape, dtype=dtype), frozenset(), nbytes
    )


def same_values(tensors: Sequence[LazyTensor], problem: str) -> LazyTensor:
    """The first of several copies; when it or a part is loaded, they are compared bit by bit.

    Args:
        tensors: Copies of the same shape and dtype.
        problem: Error message for copies that differ; follows their names.
    """
    first, *others = tensors
    if not others:
        return first

    def load(session: ReadSession) -> Tensor:
        values = first.load(session)
        for other in others:
            _compare(values, first, other, session, problem)
        return values

    def part(dim: int, start: int, length: int) -> LazyTensor:
        return same_values([tensor.narrow(dim, start, length) for tensor in tensors], problem)

    leaves = frozenset().union(*(t.leaves for t in tensors))
    # All copies are resident while they are compared.
    peak = sum(t.peak for t in tensors)
    in_parts = all(tensor.part is not None for tensor in tensors)
    return LazyTensor(first.shape, first.dtype, load, leaves, peak, part if in_parts else None)


def _compare(
    values: Tensor, first: LazyTensor, other: LazyTensor, session: ReadSession, problem: str
) -> None:
    rows = max(1, _SLAB * first.shape[0] // max(1, first.nbytes)) if first.shape else 1
    for start in range(0, first.shape[0], rows):
        length = min(rows, first.shape[0] - start)
        a = values.narrow(0, start, length)
        b = other.narrow(0, start, length).load(session)
        if not _same_bits(a, b):
            names = f"{min(first.leaves, default='')} and {min(other.leaves, default='')}"
            worst = (a.double() - b.double()).abs().max().item()
            raise CheckpointError(f"{names}: {problem}; largest difference {worst:.3g}")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
