"""The keys of requests that bring many new tokens: their own, then the cached ones in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from absorbed_mla.core_attention.key_source import KeyBlock
from absorbed_mla.core_attention.masks.spans import Span, self_attention_spans
from absorbed_mla.inference.step import CachePart, RowLengths
from absorbed_mla.sequences import SequenceLayout


@dataclass(frozen=True)
class Piece:
    """Keys of one row at positions ``start`` to ``end``."""

    row: int
    start: int
    end: int


class ChunkedContext:
    """A key source (``core_attention.keys.KeySource``) of some neighbouring rows, without gradient.

    The first block are the latents of the new tokens, as they came. The context, what was cached
    before them, is gathered from the cache a bounded number of tokens at a time, so that the
    workspace of the expanded form does not grow with it. Where that bound holds all keys, there is
    one block, the new tokens among the others, and nothing to merge.

    Args:
        lengths: Of these rows.
        first_row: Of these rows among those of the step.
        parts: Makes the parts of the cache, of all rows, up to a position.
        chunk_size: Tokens gathered at a time.
        most: All keys are gathered together where they are no more than these.
        windowed: Whether there may be several parts.
    """

    def __init__(
        self,
        lengths: RowLengths,
        first_row: int,
        parts: Callable[[int], Iterator[CachePart]],
        chunk_size: int,
        most: int,
        windowed: bool = False,
    ) -> None:
        self.first_row = first_row
        self.parts = parts
        self.chunk_size = chunk_size
        queries = lengths.queries
        starts = tuple(sum(queries[:row]) for row in range(len(queries)))
        self.layout = SequenceLayout(sum(queries), starts, queries, queries, packed=True)
        self.context = tuple(k - q for q, k in zip(queries, lengths.keys))
        self.keys = lengths.keys
        self.joined = not windowed and any(self.context) and sum(self.keys) <= most

    @property
    def num_blocks(self) -> int:
        """The new tokens, and at least one chunk where anything was cached; or all together."""
        if self.joined:
            return 1
        return 1 + -(-sum(self.context) // self.chunk_size)

    def positions(self, device: torch.device) -> None:
        """Not asked of this source: the step knows positions."""
        raise AssertionError("the step knows positions")

    def query_tokens(self, device: torch.device) -> Tensor:
        """See :class:`KeySource`."""
        return torch.arange(self.layout.num_tokens, device=device)

    def start(self, kv: Tensor) -> Tensor:
        """See :class:`KeySource`."""
        return kv

    def blocks(self, kv: Tensor, keep: bool) -> Iterator[KeyBlock]:
        """See :class:`KeySource`; a block lives until the next is asked for."""
        if self.joined:
            workspace = kv.new_empty(sum(self.keys), *kv.shape[1:])
            every = [Piece(row, 0, keys) for row, keys in enumerate(self.keys)]
            yield self._gathered(next(self.parts(max(self.keys))), every, workspace, causal=True)
            return
        yield self._block(kv, self_attention_spans(self.layout, causal=True))
        if not any(self.context):
            return
        chunk = min(self.chunk_size, sum(self.context))
        workspace = kv.new_empty(chunk, *kv.shape[1:])
        for part in self.parts(max(self.context)):
            for pieces in chunks(self.context, part.start, part.end, self.chunk_size):
                yield self._gathered(part, pieces, workspace)

    def _gathered(
        self, part: CachePart, pieces: list[Piece], workspace: Tensor, causal: bool = False
    ) -> KeyBlock:
        """Keys of rows; with ``causal`` the new tokens' are among them."""
        spans, used = [], 0
        for piece in pieces:
            first = used
            used += piece.end - piece.start
            keys = workspace[first:used, 0]
            part.gather(self.first_row + piece.row, piece.start, piece.end, keys)
            query = self.layout.starts[piece.row]
            end = query + self.layout.lengths[piece.row]
            offset = self.context[piece.row] if causal else None
            spans.append(Span(query, end, first, used, causal_offset=offset))
        return self._block(workspace[:used], tuple(spans))

    def _block(self, kv: Tensor, spans: tuple[Span, ...]) -> KeyBlock:
        # Only masks and dropout ask which tokens the keys are, and there are none here.
        return KeyBlock(kv, spans, lambda: torch.arange(len(kv), device=kv.device))

    def gradient(self, kv: Tensor, block_gradient: Callable[[KeyBlock], Tensor]) -> Tensor:
        """There is none: a cache does not know how its latents were made."""
        raise AssertionError("a cache has no gradient")


def chunks(
    context: tuple[int, ...], start: int, end: int | None, chunk_size: int
) -> Iterator[list[Piece]]:
    """Cut the context of all rows between two positions into chunks.

    Args:
        context: Cached tokens of each row.
        start: First position.
        end: One past the last, or None.
        chunk_size: Most tokens of a chunk.

    Yields:
        Pieces of a chunk, of one row each and no two of the same row; never none.
    """
    pieces: list[Piece] = []
    room = chunk_size
    for row, length in enumerate(context):
        first, last = start, length if end is None else min(length, end)
        while first < last:
            taken = min(room, last - first)
            pieces.append(Piece(row, first, first + taken))
            first, room = first + taken, room - taken
            if not room:
                yield pieces
                pieces, room = [], chunk_size
    if pieces:
        yield pieces
