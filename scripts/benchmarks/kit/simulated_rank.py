"""One process in the place of one context-parallel rank: messages of the others are made here.

Everything but the communication is the real code. What another rank would send is made, on the
device, of what this rank sends in the same message, with its channels rolled: other values of the
same distribution, so that no two tokens are alike. When a message is begun and when it is waited
for is noted: that is what its communication overlaps with.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from absorbed_mla.context_parallel.strategies import p2p
from absorbed_mla.core_attention.forms.absorbed import AbsorbedForm
from absorbed_mla.core_attention.forms.expanded import ExpandedForm
from absorbed_mla.registry import INDEXER_BACKENDS
from benchmarks.kit.timing import between

# Of a message: bytes received, and seconds from the step's beginning until it is begun, and waited
# for.
Interval = tuple[int, float, float]


@dataclass
class Message:
    """A message, in the place of ``dist.Work``."""

    timeline: Timeline
    num_bytes: int  # that this rank receives
    begun: Any  # a mark
    waited: Any = None  # a mark; None until then

    def wait(self) -> bool:
        """It is there already."""
        self.waited = self.waited or self.timeline.mark()
        return True


class Timeline:
    """The messages of a step, and the times of its pieces; read after the device has finished."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.begin()

    def begin(self) -> None:
        """Begin a step, and forget the one before."""
        self.messages: list[Message] = []
        self._pieces: list[tuple[str, Any, Any]] = []
        self._origin = self.mark()

    def mark(self) -> Any:
        """The time now, on a GPU that of its stream."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, whose time counts for the piece ``name``."""

        def run(*args: Any, **more: Any) -> Any:
            begin = self.mark()
            found = call(*args, **more)
            self._pieces.append((name, begin, self.mark()))
            return found

        return run

    def message(self, num_bytes: int) -> Message:
        """Begin a message."""
        self.messages.append(Message(self, num_bytes, self.mark()))
        return self.messages[-1]

    def seconds(self) -> Counter[str]:
        """Of every piece."""
        total: Counter[str] = Counter()
        for name, *marks in self._pieces:
            total[name] += between(*marks)
        return total

    def intervals(self) -> list[Interval]:
        """Of every message."""
        of = self._origin
        return [(m.num_bytes, between(of, m.begun), between(of, m.waited)) for m in self.messages]


def exposed_seconds(messages: Sequence[Interval], bandwidth: float) -> float:
    """How much longer a step takes whose messages go one after the other over a link.

    Args:
        messages: In the order in which they are begun.
        bandwidth: Bytes per second.
    """
    events = [(begun, 1, i) for i, (_, begun, _) in enumerate(messages)]
    events += [(waited, 2, i) for i, (_, _, waited) in enumerate(messages)]
    delay = free = 0.0
    arrival = {}
    for when, kind, number in sorted(events):
        if kind == 1:
            arrival[number] = free = max(when + delay, free) + messages[number][0] / bandwidth
        else:
            delay = max(delay, arrival[number] - when)
    return delay


class SimulatedGroup(dist.ProcessGroup):
    """A context-parallel group of which no other rank exists.

    Args:
        rank: This one.
        size: Of the group.
        timeline: Notes the messages.
        noted_size: Ranks in whose group messages are noted; ``size`` may be more.
    """

    def __init__(self, rank: int, size: int, timeline: Timeline, noted_size: int) -> None:
        super().__init__(rank, size)
        self.timeline, self._noted_size = timeline, noted_size

    def sent_by(self, rank: int, own: Tensor) -> Tensor:
        """What a rank sends where this one sends ``own``; integers are checks of equal shapes."""
        return own.roll(rank - self.rank(), -1) if own.is_floating_point() else own

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Message:
        """See ``dist.all_gather_into_tensor``."""
        for rank, part in enumerate(output.view(self.size(), *own.shape)):
            part.copy_(own if rank == self.rank() else self.sent_by(rank, own))
        return self._message(output)

    def reduce_scatter_single(self, output: Tensor, parts: Tensor, opts: Any = None) -> Message:
        """See ``dist.reduce_scatter_tensor``; this rank's share alone."""
        output.copy_(parts.view(self.size(), *output.shape)[self.rank()])
        return self._message(parts)

    # Their names in torch 2.11.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def _message(self, whole: Tensor) -> Message:
        if not whole.is_floating_point():
            return Message(self.timeline, 0, None)
        return self.timeline.message(whole.nbytes * (self._noted_size - 1) // self._noted_size)


class SimulatedTransfer:
    """See ``p2p.Transfer``."""

    def __init__(self, x: Tensor, group: SimulatedGroup, rank: int) -> None:
        self._buffer = group.sent_by(rank - 1, x)
        self._message = group.timeline.message(x.nbytes)

    def received(self) -> Tensor:
        """What comes from the rank before."""
        self._message.wait()
        return self._buffer


@contextlib.contextmanager
def simulated_exchange(timeline: Timeline) -> Iterator[None]:
    """A ``with`` block in which rings have no other ranks, and pieces of the attention are timed.

    Those are ``"attention_forward"`` and ``"attention_backward"``, and the indexer's ``"select"``
    and ``"loss"``.
    """
    timed: list[tuple[Any, str, str]] = []
    for form in (AbsorbedForm, ExpandedForm):
        timed += [(form, way, f"attention_{way}") for way in ("forward", "backward")]
    timed += [(entry, way, way) for entry in INDEXER_BACKENDS for way in ("select", "loss")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(p2p, "Transfer", SimulatedTransfer))
        for owner, way, name in timed:
            call = timeline.timed(name, getattr(owner, way))
            stack.enter_context(mock.patch.object(owner, way, call))
        yield
