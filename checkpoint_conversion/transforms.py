"""Pairs of functions between Hugging Face's tensors and Megatron's; values only move."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from checkpoint_conversion.lazy_tensor import LazyTensor, concat
from checkpoint_conversion.split_rules import same_values


class Transform(ABC):
    """What happens to tensors on their way between the two sides."""

    @abstractmethod
    def to_megatron(self, tensors: Sequence[LazyTensor]) -> LazyTensor:
        """Megatron's tensor, of Hugging Face's."""

    @abstractmethod
    def to_hugging_face(self, tensor: LazyTensor) -> list[LazyTensor]:
        """Hugging Face's tensors, of Megatron's."""


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
    """A tensor that is stored more than once; the copies are compared when it is loaded."""
    problem = (
        "hold what Megatron shares between the model and its MTP layers, but differ; "
        "--exclude-mtp leaves the MTP layers out"
    )
    return same_values([tensor, *copies], problem)
