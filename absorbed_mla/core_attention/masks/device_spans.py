"""Spans whose numbers only the device knows, because a CUDA graph is replayed with others."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from absorbed_mla.core_attention.masks.spans import Spans
from absorbed_mla.core_attention.masks.tiles import SEES_ALL


class DeviceSpans(Spans):
    """Neighbouring sequences, each causally over itself, for backends that need a tile table only.

    As a tuple they are empty. Backends that read them say so (``reads_device_spans``).

    Args:
        starts: First token of each sequence on the axis of queries and keys, int32 [Q].
        lengths: Tokens of each, int32 [Q]; 0 for what is none.
        most: Most sequences that have tokens.
    """

    starts: Tensor
    lengths: Tensor
    most: int

    def __new__(cls, starts: Tensor, lengths: Tensor, most: int) -> DeviceSpans:
        """Made anew in every run of a step, whose numbers they are."""
        made = super().__new__(cls)
        made.starts, made.lengths, made.most = starts, lengths, most
        return made

    def __iter__(self):
        """Refused: a backend that looks for spans on the host would find none."""
        raise TypeError("only the device knows the numbers of these spans")

    def query_tiles(self, size: int, length: int) -> Tensor:
        """As ``tiles.query_tiles`` of the whole axis; as many tiles as there can be.

        Those that are not needed are empty: their first query is their end, too.
        """
        make = partial(self._query_tiles, size, length)
        return self.tables.get(("query tiles", size, length), make)

    def _query_tiles(self, size: int, length: int) -> Tensor:
        there = self.lengths > 0
        first = self.starts.where(there, length).amin(0, keepdim=True)
        last = (self.starts + self.lengths).where(there, 0).amax(0, keepdim=True)
        # The sequences, and the tokens before and behind them, which see nothing.
        start = torch.cat((self.starts, torch.zeros_like(first), last))
        count = torch.cat((self.lengths, first, length - last))
        tiles = (count + size - 1) // size
        end = tiles.cumsum(0)
        number = torch.arange(length // size + self.most + 2, device=start.device)
        row = torch.searchsorted(end, number, right=True).clamp(max=len(start) - 1)
        part = number - (end - tiles)[row]
        query = torch.clamp(part * size, max=count[row])
        query_end = torch.clamp(query + size, max=count[row])
        keys = torch.where(row < len(self.starts), query_end, 0)
        offset = torch.where(query >= keys - 1, SEES_ALL, query)
        columns = query + start[row], query_end + start[row], start[row], start[row] + keys, offset
        order = keys.argsort(descending=True, stable=True)
        return torch.stack(columns, dim=1)[order].to(torch.int32)
