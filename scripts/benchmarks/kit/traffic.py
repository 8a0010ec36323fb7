"""Counting the bytes that a process sends to the other ranks of its groups.

    with count_traffic() as traffic:
        ...
    traffic.num_bytes, traffic.breakdown()

The methods of ``torch.distributed.ProcessGroup`` and of its backends are wrapped meanwhile, so that
everything counts that comes through ``torch.distributed``: TransformerEngine's ring too. What C++
calls by itself does not come through them (functional collectives, barriers).

How many bytes a rank of n sends is a convention for collectives, that of a ring. A rank's own x:

- point-to-point: x, by the one that sends
- all-gather of x: (n - 1) x
- reduce-scatter of n x: (n - 1) x
- all-reduce of x: 2 (n - 1) / n x
- all-to-all: the parts that are for others
- broadcast and scatter: by the root, one message to each of the others
- reduce and gather: x, by all but the root

Groups of one rank send nothing.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend


@dataclass(frozen=True)
class Message:
    """What one call sent.

    Attributes:
        operation: Like ``"all-gather"``, whatever torch's name for this way of calling it.
        group_size: Ranks of the group.
        num_bytes: That this rank sends.
        dtype: Of what is sent, like ``"bfloat16"``.
    """

    operation: str
    group_size: int
    num_bytes: int
    dtype: str


@dataclass
class Traffic:
    """Everything that this process sent, in the order of the calls."""

    messages: list[Message] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes sent in all."""
        return sum(message.num_bytes for message in self.messages)

    def breakdown(self) -> list[dict[str, str | int]]:
        """Calls and bytes of each operation, group size and dtype, for a report."""
        calls: Counter[tuple[str, int, str]] = Counter()
        num_bytes: Counter[tuple[str, int, str]] = Counter()
        for message in self.messages:
            kind = (message.operation, message.group_size, message.dtype)
            calls[kind] += 1
            num_bytes[kind] += message.num_bytes
        return [
            {
                "operation": operation,
                "group_size": size,
                "dtype": dtype,
                "calls": calls[operation, size, dtype],
                "bytes": num_bytes[operation, size, dtype],
            }
            for operation, size, dtype in calls
        ]


@contextlib.contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what all threads of this process send until the end; may be nested."""
    traffic, inside = Traffic(), threading.local()
    wrapped = [
        (owner, name, vars(owner)[name])
        for owner in _classes()
        for name in _OPERATIONS
        if name in vars(owner)
    ]
    try:
        for owner, name, method in wrapped:
            setattr(owner, name, _counted(method, _OPERATIONS[name], traffic, inside))
        yield traffic
    finally:
        for owner, name, method in wrapped:
            setattr(owner, name, method)


def _classes() -> list[type]:
    classes: list[type] = [dist.ProcessGroup, Backend]
    for known in classes:
        classes += set(type.__subclasses__(known)).difference(classes)
    return classes


def _counted(
    method: Callable, operation: _Operation, traffic: Traffic, inside: threading.local
) -> Callable:
    """``method`` that adds a message; not where it is how another counted method works."""

    @functools.wraps(method)
    def call(group, *args, **kwargs):
        if getattr(inside, "it", False):
            return method(group, *args, **kwargs)
        inside.it = True
        try:
            result = method(group, *args, **kwargs)
        finally:
            inside.it = False
        if group.size() > 1:
            arguments = [*args, *kwargs.values()]
            num_bytes = operation.sent(group, arguments)
            dtype = next((str(x.dtype) for x in _tensors(arguments)), "").removeprefix("torch.")
            traffic.messages.append(Message(operation.name, group.size(), num_bytes, dtype))
        return result

    return call


@dataclass(frozen=True)
class _Operation:
    """Of a group and a call's arguments, the bytes that this rank sends."""

    name: str
    sent: Callable[[Any, list], int]


def _of(number: int, sent: Callable[[int, int, Callable[[], bool]], int]) -> Any:
    """Of an argument's bytes, the group's size, and whether this rank is the root."""
    return lambda group, given: sent(
        _num_bytes(given[number]), group.size(), lambda: _is_root(group, given)
    )


def _all_to_all(group, arguments: list) -> int:
    parts = arguments[1]
    return _num_bytes(parts) - _num_bytes(parts[group.rank()])


def _all_to_all_single(group, arguments: list) -> int:
    x, splits = arguments[1], arguments[3]
    own = splits[group.rank()] if splits else x.shape[0] // group.size()
    return _num_bytes(x) - own * _num_bytes(x[:1])


def _is_root(group, arguments: list) -> bool:
    """Whether this rank is the one that the options, or the last whole number, name."""
    for argument in reversed(arguments):
        root = getattr(argument, "rootRank", argument)
        if isinstance(root, int):
            return group.rank() == root
    raise ValueError(f"no root among the arguments {arguments}")


def _num_bytes(tensors: object) -> int:
    return sum(x.numel() * x.element_size() for x in _tensors(tensors))


def _tensors(nested: object) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, Iterable) and not isinstance(nested, str):
        for part in nested:
            yield from _tensors(part)


# The names that torch 2.11 and 2.13 use; the later ones of each line are 2.13's.
_BY_KIND: dict[_Operation, str] = {
    _Operation("all-gather", _of(1, lambda x, n, root: (n - 1) * x)): (
        "allgather _allgather_base allgather_coalesced allgather_into_tensor_coalesced "
        "all_gather_single all_gather_single_coalesced"
    ),
    _Operation("reduce-scatter", _of(1, lambda x, n, root: (n - 1) * x // n)): (
        "reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced "
        "reduce_scatter_single reduce_scatter_single_coalesced"
    ),
    _Operation("all-reduce", _of(0, lambda x, n, root: 2 * (n - 1) * x // n)): (
        "allreduce allreduce_coalesced"
    ),
    _Operation("send", _of(0, lambda x, n, root: x)): "send",
    _Operation("broadcast", _of(0, lambda x, n, root: (n - 1) * x * root())): "broadcast",
    # Only the root passes anything to scatter.
    _Operation("scatter", _of(1, lambda x, n, root: (n - 1) * x // n)): "scatter",
    _Operation("reduce", _of(0, lambda x, n, root: x * (not root()))): "reduce",
    _Operation("gather", _of(1, lambda x, n, root: x * (not root()))): "gather",
    _Operation("all-to-all", _all_to_all): "alltoall",
    _Operation("all-to-all", _all_to_all_single): "alltoall_base all_to_all_single",
}
_OPERATIONS = {name: operation for operation, names in _BY_KIND.items() for name in names.split()}
