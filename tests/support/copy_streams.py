"""Two streams that run as far apart as their events allow, for the staging buffers."""

from collections import defaultdict
from collections.abc import Iterator

import torch

from absorbed_mla.inference.kv_offload import staging_buffers
from absorbed_mla.inference.kv_offload.blocks import OffloadedBlocks
from absorbed_mla.inference.step import CachePart

COPY, MAIN = 0, 1


class RecordedStreams:
    """Copies are done as late as possible; what no event orders fails.

    Each stream counts its work and knows how much of the other's comes before its own.

    Attributes:
        copies: Buffers copied to, in order.
        ahead: Whenever the main stream waits for a copy, how many are queued by then.
    """

    def __init__(self) -> None:
        self.copies: list[int] = []
        self.ahead: list[int] = []
        self._known = [[0, 0], [0, 0]]
        self._copied: dict[int, list[int]] = {}
        self._free: dict[int, list[int]] = {}
        self._written: dict[int, int] = defaultdict(int)
        self._read: dict[int, int] = defaultdict(int)
        self._moved = 0
        self._deferred: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def begin(self) -> None:
        self._wait(COPY, self._known[MAIN])

    def await_free(self, buffer: int) -> None:
        self._wait(COPY, self._free.get(buffer, [0, 0]))

    def copy(self, buffer: int, target: torch.Tensor, source: torch.Tensor) -> None:
        seen = self._known[COPY][MAIN]
        assert seen >= self._read[buffer], f"buffer {buffer} is overwritten before it is read"
        assert seen >= self._moved, "host memory is read before blocks were moved there"
        self._written[buffer] = self._work(COPY)
        self._deferred.append((self._written[buffer], target, source))

    def copied(self, buffer: int) -> None:
        self.copies.append(buffer)
        self._copied[buffer] = list(self._known[COPY])

    def await_copied(self, buffer: int) -> None:
        self.ahead.append(len(self.copies))
        self._wait(MAIN, self._copied[buffer])
        done = self._known[MAIN][COPY]
        while self._deferred and self._deferred[0][0] <= done:
            _, target, source = self._deferred.pop(0)
            target.copy_(source)

    def free(self, buffer: int) -> None:
        self._free[buffer] = list(self._known[MAIN])

    def read(self, *buffers: int) -> None:
        """Work on the main stream that reads buffers."""
        seen = self._known[MAIN][COPY]
        for buffer in buffers:
            assert seen >= self._written[buffer], f"buffer {buffer} is read before it is copied"
            self._read[buffer] = self._work(MAIN)

    def moved(self) -> None:
        """Work on the main stream that writes to host memory."""
        self._moved = self._work(MAIN)

    def _work(self, stream: int) -> int:
        self._known[stream][stream] += 1
        return self._known[stream][stream]

    def _wait(self, stream: int, event: list[int]) -> None:
        self._known[stream] = list(map(max, self._known[stream], event))


def record(monkeypatch) -> RecordedStreams:
    """Have the next :class:`OffloadedBlocks` use such streams, and record what is read."""
    streams = RecordedStreams()
    monkeypatch.setattr(staging_buffers, "streams_for", lambda memory, buffers: streams)
    parts, swap = OffloadedBlocks.parts, OffloadedBlocks._swap

    def recorded_parts(tiers: OffloadedBlocks, *args) -> Iterator[CachePart]:
        first = tiers.resident.shape[:2].numel()
        for part in parts(tiers, *args):
            table = part.rows.block_table
            buffers = ((table[table >= first] - first) // tiers._staged).unique().tolist()
            streams.read(*buffers)
            yield part
            # What reads it is queued until the next part is asked for.
            streams.read(*buffers)

    def recorded_swap(tiers: OffloadedBlocks, *args) -> None:
        swap(tiers, *args)
        streams.moved()

    monkeypatch.setattr(OffloadedBlocks, "parts", recorded_parts)
    monkeypatch.setattr(OffloadedBlocks, "_swap", recorded_swap)
    return streams
