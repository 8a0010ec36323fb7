"""Check that context-parallel ranks got equal shapes, before they exchange anything else."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch import Tensor

from absorbed_mla.core_attention.device_table import to_device
from absorbed_mla.sequences import SequenceLayout

_ITEMS = ("tokens of all ranks", "batch", "element size of the dtype", "sequence boundaries (CRC)")


def require_equal_shapes(
    group: dist.ProcessGroup, layout: SequenceLayout, batch: int, dtype: torch.dtype
) -> None:
    """Check that every rank of ``group`` passes the same shapes and boundaries.

    Every call communicates, so that ranks stay in step whatever each of them has seen before. On a
    GPU reading the answer waits for it, so a rank reads at once only what it has not passed before.
    The answer to a repeated call is read with the next call that finds it there.

    Raises:
        ValueError: With what each rank has.
    """
    item_size = torch.finfo(dtype).bits // 8
    own = (layout.num_tokens, batch, item_size, _checksum(layout))
    if not torch.cuda.is_available():
        answer, work = _begin_gather(group, torch.tensor(own, dtype=torch.int64))
        work.wait()
        _raise_if_different(answer.tolist())
        return
    history = layout.tables.get(("shapes", group, batch, item_size), lambda: _History(group, own))
    history.check()


class _History:
    """The checks of one kind of call on a GPU.

    They run beside the computation: it waits for the first answer only.
    """

    def __init__(self, group: dist.ProcessGroup, own: tuple[int, ...]) -> None:
        self.group = group
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.own = to_device(lambda: torch.tensor(own, dtype=torch.int64), self.device)
        self.stream = torch.cuda.Stream(self.device)
        self.first = True
        # An answer on its way to the host, and the event that says when it is there.
        self.unread: tuple[Tensor, torch.cuda.Event] | None = None

    def check(self) -> None:
        """Communicate; raise for this call if it is the first one, or for an earlier one."""
        answer, work = _begin_gather(self.group, self.own)
        if self.first:
            work.wait()
            _raise_if_different(answer.tolist())
            self.first = False
            return
        if self.unread is not None and self.unread[1].query():
            on_host, self.unread = self.unread[0], None
            _raise_if_different(on_host.tolist())
        if self.unread is None:
            self.unread = self._copy_to_host(answer, work)

    def _copy_to_host(self, answer: Tensor, work: dist.Work) -> tuple[Tensor, torch.cuda.Event]:
        on_host = torch.empty(answer.shape, dtype=answer.dtype, pin_memory=True)
        answer.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            work.wait()
            on_host.copy_(answer, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return on_host, event


def _checksum(layout: SequenceLayout) -> int:
    def make() -> int:
        return zlib.crc32(repr((layout.starts, layout.lengths, layout.slots, layout.tree)).encode())

    return layout.tables.get("checksum", make)


def _begin_gather(group: dist.ProcessGroup, own: Tensor) -> tuple[Tensor, dist.Work]:
    """Begin to gather every rank's ``own`` [items] as [ranks, items]."""
    everyone = own.new_empty(group.size() * len(own))
    work = dist.all_gather_into_tensor(everyone, own, group=group, async_op=True)
    return everyone.view(group.size(), len(own)), work


def _raise_if_different(by_rank: list[list[int]]) -> None:
    differing = [
        f"{item}: {', '.join(str(value) for value in values)}"
        for item, values in zip(_ITEMS, zip(*by_rank))
        if len(set(values)) > 1
    ]
    if differing:
        raise ValueError(
            "the context-parallel ranks were given different input; rank by rank, "
            + "; ".join(differing)
        )
