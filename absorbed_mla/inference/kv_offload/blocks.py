"""Blocks of a latent cache on the device and in CPU memory: where each lies, and moving them.

Megatron's allocator gives out numbers of blocks and knows nothing of this. A block has a slot, on
the device or in host memory, which changes between steps. A step writes to blocks on the device
only. It reads the others through buffers on the device (``staging_buffers.py``), a window of
neighbouring blocks of all requests at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from absorbed_mla.core_attention.device_table import to_device
from absorbed_mla.inference.kv_offload.staging_buffers import NUM_BUFFERS, Run, StagingRing
from absorbed_mla.inference.rows import Rows
from absorbed_mla.inference.step import CachePart

# Positions of blocks that no request of the step reads, and of those that it writes to.
_FREE, _IDLE, _WRITTEN = -2, -1, 2**31


@dataclass(frozen=True)
class Window:
    """Some columns of the block table.

    Attributes:
        start: The first.
        end: One past the last; None: there are no more.
        runs: What to copy; some where the step reads anything from host memory, else none.
    """

    start: int
    end: int | None
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class StepPlan:
    """Where a step finds its blocks, the same for all layers.

    Attributes:
        windows: In order of position, at least one.
        tables: For every entry of the block table its block in the memory of the first layer, by
            the buffer that the first window is in, and by how many blocks that of the next layer
            lies behind it; int32 [buffers + 1, rows, columns].
        slots: Slot of each new token's block, int64 [T].
    """

    windows: tuple[Window, ...]
    tables: Tensor
    slots: Tensor


class OffloadedBlocks:
    """Memory for the latents of all layers, in slots, and what lies in them.

    Args:
        device_blocks: Slots on the device, one of them for Megatron's padding.
        host_blocks: Slots in host memory.
        block: Shape of a block, [block_size, C + R].
        staged: Blocks of a buffer, at least as many as requests in a step or all in host memory.

    Attributes:
        resident: The slots on the device, [layers, device_blocks, block_size, C + R].
        host: The slots in host memory, [layers, host_blocks, block_size, C + R].
        plan: Of the current step.
    """

    plan: StepPlan

    def __init__(
        self,
        layers: int,
        device_blocks: int,
        host_blocks: int,
        block: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        staged: int,
    ) -> None:
        self._count, self._staged, self._block_size = device_blocks, staged, block[0]
        slots = layers * device_blocks
        # Buffers lie behind the slots, where a block table that begins with any layer reaches them.
        self._memory = torch.empty(
            (slots + NUM_BUFFERS * staged, *block), dtype=dtype, device=device
        )
        self.resident = self._memory[:slots].view(layers, device_blocks, *block)
        pinned = device.type == "cuda"
        self.host = torch.empty((layers, host_blocks, *block), dtype=dtype, pin_memory=pinned)
        total = device_blocks + host_blocks
        # Slot of each block; the allocator gives out its last blocks first, and pads with the last.
        self._slot = (torch.arange(total) - host_blocks) % total
        # Whether a block's latents are of any use.
        self._filled = torch.zeros(total, dtype=torch.bool)
        buffers = self._memory[slots:].view(NUM_BUFFERS, staged, *block)
        self._ring = StagingRing(buffers, self.host)
        # Blocks of each row of the step that the plan was made for.
        self._planned: Tensor | None = None

    @property
    def num_streamed(self) -> int:
        """Blocks in host memory that the current step reads."""
        return sum(count for window in self.plan.windows for _, _, count in window.runs)

    def allocated(self, blocks: Tensor) -> None:
        """These blocks are given to a request: what they held is of no use."""
        self._filled[blocks.long()] = False

    def begin_step(
        self, table: Tensor, used: Tensor, token_blocks: Tensor, free: Tensor, num_rows: int
    ) -> None:
        """Move blocks, and plan the step; all tensors are on the CPU.

        Args:
            table: Blocks of each request, [requests, columns].
            used: How many of them hold keys of the step, the new tokens' included, [requests].
            token_blocks: Block of each new token; of padding that of Megatron's, the last, [T].
            free: Blocks that nobody has.
            num_rows: Rows of the block table, padding included.
        """
        columns = torch.arange(int(used.max()) if len(used) else 1)
        table = table[:, : len(columns)].long()
        there = columns < used[:, None]
        position = torch.full_like(self._slot, _IDLE)
        position[free.long()] = _FREE
        places = columns.expand_as(table)[there]
        # A block that several requests share has the same place in all of them.
        position[table[there]] = places
        column = position.clone()
        position[token_blocks] = _WRITTEN
        moved = self._move(position)
        # What changes in the step is read where it is written, never from a copy.
        assert (self._slot[token_blocks] < self._count).all(), "a step writes to host memory"
        self._filled[token_blocks] = True
        padding = len(self._slot) - 1
        whole = torch.full((num_rows, len(columns)), padding)
        whole[: len(table)] = torch.where(there, table, padding)
        device = self._memory.device
        if moved or self._planned is None or not torch.equal(self._planned, whole):
            # Else, as in most steps that decode, the last step's are right.
            windows, numbers = self._windows(column, len(columns))
            tables = to_device(lambda: numbers[:, whole].to(torch.int32), device)
            self._planned = whole
        else:
            windows, tables = self.plan.windows, self.plan.tables
        slots = to_device(lambda: self._slot[token_blocks], device)
        self.plan = StepPlan(windows, tables, slots)
        self._ring.begin([window.runs for window in windows if window.runs])

    def write(self, layer: int, places: Tensor, kv: Tensor) -> None:
        """Store the latents of the step's new tokens.

        Args:
            layer: From 0.
            places: Of the tokens in their blocks, [T].
            kv: [T, C + R].
        """
        self.resident[layer][self.plan.slots, places] = kv

    def parts(self, layer: int, rows: Rows, end: int | None) -> Iterator[CachePart]:
        """The keys of a layer below position ``end``; see ``InferenceStep.parts``."""
        size = self._block_size
        *numbers, stride = self.plan.tables
        for index, window in enumerate(self.plan.windows):
            if end is not None and window.start * size >= end:
                break
            first = 0
            if window.runs:
                first = (self._ring.take(layer, index) - index) % NUM_BUFFERS
            part = slice(window.start, window.end)
            blocks = torch.add(numbers[first][:, part], stride[:, part], alpha=layer)
            last = None if window.end is None else window.end * size
            found = replace(rows, block_table=blocks)
            yield CachePart(self._memory, found, window.start * size, last)
            # Whoever asks for another part has queued what reads this one.
            self._ring.free()

    def read_block(self, block: int) -> Tensor:
        """A copy of a block's latents on the CPU, [layers, block_size, C + R]."""
        if self._memory.is_cuda:  # which may still write to host memory
            torch.cuda.current_stream(self._memory.device).synchronize()
        far = self.host_block(block)
        return self.resident[:, self._slot[block]].cpu().clone() if far is None else far.clone()

    def host_block(self, block: int) -> Tensor | None:
        """A block's latents in host memory, [layers, block_size, C + R]; None: on the device.

        Whoever changes them waits for the device first, and tells :meth:`filled` then.
        """
        slot = int(self._slot[block])
        return None if slot < self._count else self.host[:, slot - self._count]

    def slots_of(self, blocks: Sequence[int]) -> Tensor:
        """Where in :attr:`resident` blocks on the device are, int64."""
        return self._slot[list(blocks)]

    def filled(self, blocks: Sequence[int]) -> None:
        """The latents of these blocks were set."""
        self._filled[list(blocks)] = True
        self._ring.forget()

    def _move(self, position: Tensor) -> bool:
        """Bring blocks of the step to the device, instead of others; whether there were any.

        What is written to must come, if need be for what stands first in a request: later requests
        read the windows of that together. Other blocks of the step come where the device holds
        something that the step does not read.
        """
        on_device = self._slot < self._count
        coming = torch.nonzero((position >= 0) & ~on_device).flatten()
        coming = coming[position[coming].argsort(descending=True, stable=True)]
        going = torch.nonzero(on_device[:-1]).flatten()  # not the padding
        going = going[position[going].argsort(stable=True)]
        needed = int((position[coming] == _WRITTEN).sum())
        unread = int((position[going] < 0).sum())
        count = max(needed, min(len(coming), unread))
        assert not (position[going[:count]] == _WRITTEN).any(), "a step writes to too many blocks"
        if count:
            filled = self._filled & (position != _FREE)
            self._swap(coming[:count], going[:count], filled)
        return bool(count)

    def _swap(self, coming: Tensor, going: Tensor, filled: Tensor) -> None:
        """Exchange the slots of blocks in host memory with those of blocks on the device."""
        # Neighbours in a request become neighbours in host memory, so that runs are long.
        coming = coming[self._slot[coming].argsort()]
        host, device = self._slot[coming] - self._count, self._slot[going]
        self._slot[coming], self._slot[going] = device, host + self._count
        inward, outward = filled[coming], filled[going]
        here = self._memory.device
        to_slots = to_device(lambda: device[inward], here)
        from_slots = to_device(lambda: device[outward], here)
        into, out_of = runs_of(host[outward].tolist()), runs_of(host[inward].tolist())
        for resident, far in zip(self.resident, self.host):
            # In this order, because both may be about the same slots.
            arrived = resident.new_empty(len(to_slots), *resident.shape[1:])
            for place, slot, count in out_of:
                arrived[place : place + count].copy_(far[slot : slot + count], non_blocking=True)
            leaving = resident[from_slots]
            for place, slot, count in into:
                target = far[slot : slot + count]
                target.copy_(leaving[place : place + count], non_blocking=far.is_pinned())
            resident[to_slots] = arrived

    def _windows(self, column: Tensor, num_columns: int) -> tuple[tuple[Window, ...], Tensor]:
        """Windows of the block table, and for every block the numbers of ``StepPlan.tables``.

        ``column`` is that of each block in the table, below 0 if it is in none.
        """
        slots = len(self._memory) - NUM_BUFFERS * self._staged
        numbers = self._slot.repeat(NUM_BUFFERS + 1, 1)
        numbers[NUM_BUFFERS] = self._count
        far = torch.nonzero((column >= 0) & (self._slot >= self._count)).flatten()
        counts = column[far].bincount(minlength=num_columns).tolist()
        windows = []
        for index, (start, end) in enumerate(cuts_of(counts, self._staged)):
            mine = far[(column[far] >= start) & (column[far] < end)]
            mine = mine[self._slot[mine].argsort()]
            runs = runs_of((self._slot[mine] - self._count).tolist())
            buffers = (torch.arange(NUM_BUFFERS) + index) % NUM_BUFFERS
            places = torch.arange(slots, slots + len(mine))
            numbers[:NUM_BUFFERS, mine] = places + self._staged * buffers[:, None]
            numbers[NUM_BUFFERS, mine] = 0
            windows.append(Window(start, None if end == num_columns else end, runs))
        return tuple(windows), numbers


def cuts_of(counts: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Cut a sequence into as few pieces as have a sum of at most ``most``; none is above it."""
    cuts, start, total = [], 0, 0
    for index, count in enumerate(counts):
        if total + count > most:
            cuts.append((start, index))
            start, total = index, 0
        total += count
    return [*cuts, (start, len(counts))]


def runs_of(slots: Sequence[int]) -> tuple[Run, ...]:
    """Neighbours among slots: index of the first, its slot, and how many follow each other."""
    runs: list[Run] = []
    for index, slot in enumerate(slots):
        if runs and sum(runs[-1][1:]) == slot:
            first, start, count = runs[-1]
            runs[-1] = (first, start, count + 1)
        else:
            runs.append((index, slot, 1))
    return tuple(runs)
