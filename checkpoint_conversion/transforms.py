"""How a tensor is split over tensor-parallel ranks, and changed from Hugging Face to Megatron."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession, concat

# Copies are compared in slabs of this many bytes.
_SLAB = 32 << 20


class Rule(ABC):
    """One way to split a tensor over tensor-parallel ranks."""

    @abstractmethod
    def shard(self, tensor: LazyTensor, size: int) -> list[LazyTensor]:
        """The shares of ``size`` ranks; :meth:`divides` must hold."""

    @abstractmethod
    def merge(self, tensors: Sequence[LazyTensor]) -> LazyTensor:
        """The whole tensor of the ranks' shares, in rank order."""

    def divides(self, shape: tuple[int, ...], size: int) -> bool:
        """Whether a tensor of ``shape`` can be split equally over ``size`` ranks."""
        return True


class Replicated(Rule):
    """Every rank has the whole tensor."""

    def shard(self, tensor: LazyTensor, size: int) -> list[LazyTensor]:
        """The tensor, ``size`` times."""
        return [tensor] * size

    def merge(self, tensors: Sequence[LazyTensor]) -> LazyTensor:
        """The first copy; the others are compared with it, bit by bit, when it is loaded."""
        return same_values(tensors, "differs between tensor-parallel ranks, which must hold copies")


class Cut(Rule):
    """Every rank has an equal consecutive part along one dim."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def shard(self, tensor: LazyTensor, size: int) -> list[LazyTensor]:
        """Equal parts along the dim."""
        return tensor.chunk(size, self.dim)

    def merge(self, tensors: Sequence[LazyTensor]) -> LazyTensor:
        """The parts one after the other."""
        return concat(tensors, self.dim)

    def divides(self, shape: tuple[int, ...], size: int) -> bool:
        """Whether the dim's width is a multiple of ``size``."""
        return shape[self.dim] % size == 0


class GatedRows(Rule):
    """Rows are [gate; up]; every rank has its part of the gate rows, then of the up rows."""

    def shard(self, tensor: LazyTensor, size: int) -> list[LazyTensor]:
        """Per rank: its rows of the gate, then its rows of the up part."""
        gate, up = tensor.chunk(2)
        return [concat(pair) for pair in zip(gate.chunk(size), up.chunk(size))]

    def merge(self, tensors: Sequence[LazyTensor]) -> LazyTensor:
        """All gates, then all up parts."""
        gates, ups = zip(*(tensor.chunk(2) for tensor in tensors))
        return tensors[0] if len(tensors) == 1 else concat([concat(gates), concat(ups)])

    def divides(self, shape: tuple[int, ...], size: int) -> bool:
        """Whether each half's rows are a multiple of ``size``."""
        return shape[0] % (2 * size) == 0


REPLICATED = Replicated()
ROWS = Cut(0)
COLUMNS = Cut(1)
GATED_ROWS = GatedRows()


def same_values(tensors: Sequence[LazyTensor], problem: str) -> LazyTensor:
    """The first of several copies; when it is loaded, they are compared bit by bit.

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

    leaves = frozenset().union(*(t.leaves for t in tensors))
    # All copies are resident while they are compared.
    peak = sum(t.peak for t in tensors)
    return LazyTensor(first.shape, first.dtype, load, leaves, peak)


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


class Transform(ABC):
    """A pair of functions between Hugging Face's tensors and Megatron's; values only move."""

    @abstractmethod
    def to_megatron(self, tensors: Sequence[LazyTensor]) -> LazyTensor:
        """Megatron's tensor, made of Hugging Face's."""

    @abstractmethod
    def to_hugging_face(self, tensor: LazyTensor) -> list[LazyTensor]:
        """Hugging Face's tensors, made of Megatron's."""


class Copy(Transform):
    """The same tensor on both sides."""

    def to_megatron(self, tensors: Sequence[LazyTensor]) -> LazyTensor:
        """The tensor."""
        (tensor,) = tensors
        return tensor

    def to_hugging_face(self, tensor: LazyTensor) -> list[LazyTensor]:
        """The tensor."""
        return [tensor]


class Gated(Transform):
    """``gate_proj`` [F, h] and ``up_proj`` [F, h]; Megatron's ``linear_fc1`` [2F, h] has both."""

    def to_megatron(self, tensors: Sequence[LazyTensor]) -> LazyTensor:
        """The gate's rows above the up part's."""
        gate, up = tensors
        return concat([gate, up])

    def to_hugging_face(self, tensor: LazyTensor) -> list[LazyTensor]:
        """The upper and the lower half."""
        return tensor.chunk(2)


COPY = Copy()
GATED = Gated()


def with_duplicates(tensor: LazyTensor, copies: Sequence[LazyTensor]) -> LazyTensor:
    """A tensor that Hugging Face stores more than once; loading it compares the copies."""
    problem = (
        "hold what Megatron shares between the model and its MTP layers, but differ; "
        "--exclude-mtp leaves the MTP layers out"
    )
    return same_values([tensor, *copies], problem)
