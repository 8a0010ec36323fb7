"""The packed bitmask: which tokens the grammars of a step's rows allow, a bit each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

# A row takes some 50 us; ranks on one machine have threads of their own.
_NUM_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))


class Grammar(Protocol):
    """What writes a row: ``RequestGrammar``."""

    def masks(self, row: int, drafts: Sequence[int]) -> list[tuple[Any, int]]:
        """Write the row, or return the matcher that computes it."""
        ...

    def place_stop_tokens(self, row: int) -> None:
        """Finish a row that a matcher has computed."""
        ...


# A row of logits, its request's grammar, and drafts before its token.
ConstrainedRow = tuple[int, Grammar, Sequence[int]]


class PackedBitmask:
    """Bits of rows, in pinned memory, that are sent to the device and applied to logits there.

    A row is int32 [ceil((vocab_size + 1) / 32)]: a bit for each token, the lowest one first, and
    one that says whether the text may end.

    Args:
        vocab_size: Number of tokens.
    """

    def __init__(self, vocab_size: int) -> None:
        from llguidance import LLExecutor

        self._vocab_size, self._words = vocab_size, vocab_size // 32 + 1
        self._executor = LLExecutor(_NUM_THREADS)
        self._sent = torch.cuda.Event()
        self._take(1)
        # By byte, which of its tokens are not allowed.
        bits = torch.arange(256).unsqueeze(-1) >> torch.arange(8)
        self._forbidden = (bits & 1 == 0).to(torch.cuda.current_device())

    def apply(self, logits: Tensor, rows: Sequence[ConstrainedRow]) -> Tensor:
        """Logits in which tokens that the grammars do not allow cannot be drawn.

        Args:
            logits: [rows, vocabulary], any floating dtype; not changed.
            rows: With grammars, which have read the output.
        """
        # It reads the memory that is written now.
        self._sent.synchronize()
        if len(rows) > len(self._host):
            self._take(2 * len(rows))
        found = [found for i, (_, one, drafts) in enumerate(rows) for found in one.masks(i, drafts)]
        self.compute(found)
        for _, i in found:
            rows[i][1].place_stop_tokens(i)
        index = [row for row, *_ in rows]
        # From pinned memory, too: the host would wait for the model that runs.
        self._rows.numpy()[: len(rows)] = index
        places = self._rows[: len(rows)].to(logits.device, non_blocking=True)
        forbidden = self._unpacked(len(rows), logits)
        if len(index) == len(logits):
            return logits.masked_fill(forbidden, -torch.inf)
        return logits.index_copy(0, places, logits[places].masked_fill(forbidden, -torch.inf))

    def compute(self, found: Sequence[tuple[Any, int]]) -> None:
        """Let matchers write their rows, each in a thread; Python goes on meanwhile."""
        if found:
            memory = self._host.data_ptr()
            self._executor.unsafe_compute_mask_ptr(
                list(found), memory, self._words * 4, len(self._host)
            )

    def fill(self, row: int, byte: int) -> None:
        """Let all bytes of a row be equal."""
        width = self._words * 4
        self._bytes[row * width : (row + 1) * width] = bytes([byte]) * width

    def may_end(self, row: int) -> bool:
        """Whether the row's text may end."""
        return bool(self._bytes[self._place(row, self._vocab_size)] >> self._vocab_size % 8 & 1)

    def allow(self, row: int, token: int, allowed: bool) -> None:
        """Let a token be allowed in a row, or not."""
        if token >= self._vocab_size:
            return
        place, bit = self._place(row, token), 1 << token % 8
        self._bytes[place] = self._bytes[place] | bit if allowed else self._bytes[place] & ~bit

    def _place(self, row: int, token: int) -> int:
        return row * self._words * 4 + token // 8

    def _take(self, rows: int) -> None:
        self._rows = torch.zeros(rows, dtype=torch.int64, pin_memory=True)
        self._host = torch.zeros(rows, self._words, dtype=torch.int32, pin_memory=True)
        self._bytes = memoryview(self._host.view(torch.uint8).numpy()).cast("B")

    def _unpacked(self, count: int, logits: Tensor) -> Tensor:
        """Tokens that are not allowed in the first rows, bool [count, vocabulary] on the device."""
        sent = self._host[:count].to(logits.device, non_blocking=True)
        self._sent.record()
        places = sent.view(torch.uint8).flatten().int()
        forbidden = self._forbidden.index_select(0, places).view(count, -1)
        width = logits.shape[-1]
        forbidden = forbidden[:, : min(width, self._vocab_size)]
        return torch.nn.functional.pad(forbidden, (0, width - forbidden.shape[-1]), value=True)
