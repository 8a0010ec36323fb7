"""Which tokens each context-parallel rank holds, and what they see: index arithmetic only.

Megatron cuts every sequence (its padded slot, in a pack) into 2 cp chunks and gives rank r the
chunks r and 2 cp - 1 - r, one early and one late, so that causal attention costs every rank the
same. A rank holds its two chunks of the first sequence, then its two of the second, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from absorbed_mla.caching import DerivedTables
from absorbed_mla.core_attention.masks.spans import Run, Span, Spans, with_prefixes
from absorbed_mla.sequences import SequenceLayout


@dataclass(frozen=True)
class ContextParallelLayout:
    """The part of a batch or pack that one context-parallel rank holds.

    Attributes:
        sequences: The whole batch or pack.
        cp_size: Number of ranks.
        cp_rank: This rank.

    Raises:
        ValueError: If a sequence does not divide into 2 cp_size chunks.
    """

    sequences: SequenceLayout
    cp_size: int
    cp_rank: int
    _tables: DerivedTables = field(
        # Spans of every rank's block; indices and spans of windows, on the CPU and on the device.
        default_factory=lambda: DerivedTables(maxsize=512),
        init=False,
        compare=False,
        repr=False,
    )

    @classmethod
    def of(cls, sequences: SequenceLayout, cp_size: int, cp_rank: int) -> ContextParallelLayout:
        """The part of a rank, one object for all layers."""
        return sequences.tables.get(
            ("context parallel", cp_size, cp_rank), lambda: cls(sequences, cp_size, cp_rank)
        )

    def __post_init__(self) -> None:
        chunks = 2 * self.cp_size
        for i, slot in enumerate(self.sequences.slots):
            if slot % chunks:
                which, hint = "the sequence", ""
                if self.sequences.tree is not None:
                    which, hint = f"node {i} of prefix_tree", "; pad it (padded_lengths)"
                elif self.sequences.packed:
                    which, hint = f"sequence {i}", " by cu_seqlens_q_padded; pad it"
                raise ValueError(
                    f"context parallelism over {self.cp_size} ranks cuts every sequence into "
                    f"2 x {self.cp_size} = {chunks} equal chunks, but {which} has "
                    f"{slot} tokens{hint}"
                )

    @property
    def num_local_tokens(self) -> int:
        """Tokens that every rank holds."""
        return self.sequences.num_tokens // self.cp_size

    def tokens(self, rank: int | None = None) -> Tensor:
        """The token of the whole batch or pack behind each token of a rank (this one); int64."""
        rank = self.cp_rank if rank is None else rank
        starts = torch.tensor(self.sequences.starts)
        sizes = torch.tensor(self.sequences.slots) // (2 * self.cp_size)
        early, late = (starts + chunk * sizes for chunk in self._chunks_of(rank))
        runs = torch.stack((early, late), dim=1).flatten()
        sizes = sizes.repeat_interleave(2)
        first_of_run = sizes.cumsum(0) - sizes
        offsets = (runs - first_of_run).repeat_interleave(sizes)
        return torch.arange(self.num_local_tokens) + offsets

    def positions(self) -> Tensor:
        """Position of each of this rank's tokens in its own sequence; int64."""
        slots = torch.tensor(self.sequences.slots) // self.cp_size
        return self.tokens() - self.sequences.zeros().repeat_interleave(slots)

    def rank_major(self) -> Tensor:
        """The tokens of rank 0, of rank 1, ...: where each one is in the whole pack; int64."""
        return torch.cat([self.tokens(rank) for rank in range(self.cp_size)])

    def sequence_order(self) -> Tensor:
        """The inverse of :meth:`rank_major`: where the ranks' tokens hold each token; int64."""
        return self.rank_major().argsort()

    def index(self, name: str, device: torch.device) -> Tensor:
        """The result of the method ``name`` on ``device``; all layers of a model need the same.

        Args:
            name: ``"tokens"``, ``"positions"``, ``"rank_major"`` or ``"sequence_order"``.
            device: Where the index is needed.
        """

        def make() -> Tensor:
            # An index made under inference mode must serve training as well.
            with torch.inference_mode(False):
                return getattr(self, name)().to(device)

        return self._tables.get((name, device), make)

    def gathered_spans(self, causal: bool) -> Spans:
        """What this rank's queries see of all tokens in the order of the whole batch or pack."""
        return self._tables.get(
            ("gathered", causal),
            lambda: self._with_prefixes(self._make_gathered_spans(causal), self.sequences.runs()),
        )

    def block_spans(self, key_rank: int, causal: bool) -> Spans:
        """What this rank's queries see of the tokens of ``key_rank``, in that rank's order."""
        return self._tables.get(
            ("block", key_rank, causal),
            lambda: self._with_prefixes(
                self._make_block_spans(key_rank, causal), self._local_runs(key_rank)
            ),
        )

    def window_blocks(
        self, key_rank: int, window: int, device: torch.device
    ) -> tuple[tuple[Tensor, Spans], ...]:
        """What this rank's queries see, in a window, of the early and of the late keys of a rank.

        Both are needed for one query, which is in at most one span of a block.

        Returns:
            For each of the two where a key is seen: which of the tokens of ``key_rank`` are keys,
            int64, and the spans over these. There is always a block of a rank's own tokens.
        """

        def make() -> tuple[tuple[Tensor, Spans], ...]:
            # An index made under inference mode must serve training as well.
            with torch.inference_mode(False):
                if device.type != "cpu":
                    there = self.window_blocks(key_rank, window, torch.device("cpu"))
                    return tuple((rows.to(device), spans) for rows, spans in there)
                found = (self._window_block(key_rank, place, window) for place in (0, 1))
                blocks = [(rows, spans) for rows, spans in found if spans]
                if not blocks and key_rank == self.cp_rank:
                    blocks = [(torch.arange(self.num_local_tokens), Spans())]
                return tuple(blocks)

        return self._tables.get(("window", key_rank, window, device), make)

    def _window_block(self, key_rank: int, place: int, window: int) -> tuple[Tensor, Spans]:
        rows = [torch.arange(0)]
        spans: list[Span] = []
        end = 0
        for start, length, size in self._slots():
            first, joined = start // self.cp_size, False
            keys = self._real_tokens(key_rank, length, size)[place]
            counts = self._real_tokens(self.cp_rank, length, size)
            for i, chunk in enumerate(self._chunks_of(self.cp_rank)):
                before = (chunk - self._chunks_of(key_rank)[place]) * size
                # The first query's oldest key; the last query that sees the newest one.
                oldest = max(0, before - window + 1)
                count = min(counts[i], keys + window - 1 - before)
                if before < 0 or count <= 0:
                    continue
                if not joined:
                    # Late queries see no older keys than early ones.
                    key = first + place * size
                    rows.append(torch.arange(key + oldest, key + keys))
                    end, joined = end + keys - oldest, True
                spans += _span(
                    first + i * size, count, end - keys + oldest, keys - oldest, before - oldest
                )
        return torch.cat(rows), Spans(spans)

    def _make_gathered_spans(self, causal: bool) -> list[Span]:
        spans = []
        for start, length, chunk_size in self._slots():
            first = start // self.cp_size
            queries = self._real_tokens(self.cp_rank, length, chunk_size)
            if not causal:
                spans += _span(first, sum(queries), start, length, None)
                continue
            for place, chunk in enumerate(self._chunks_of(self.cp_rank)):
                before, count = chunk * chunk_size, queries[place]
                spans += _span(first + place * chunk_size, count, start, before + count, before)
        return spans

    def _make_block_spans(self, key_rank: int, causal: bool) -> list[Span]:
        """At most one span for each sequence, so that a block is one call for each of them.

        Late tokens exist only where the early chunk is full, so they follow it without a gap.
        """
        spans = []
        for start, length, size in self._slots():
            first = start // self.cp_size
            early_keys, late_keys = self._real_tokens(key_rank, length, size)
            early, late = self._real_tokens(self.cp_rank, length, size)
            every_query, every_key = early + late, early_keys + late_keys
            if not causal:
                spans += _span(first, every_query, first, every_key, None)
            elif key_rank == self.cp_rank:
                # The early chunk lies before the late one here as in the sequence.
                spans += _span(first, every_query, first, every_key, 0)
            elif key_rank < self.cp_rank:
                # Their early chunk lies before both of ours, their late one after both.
                spans += _span(first, every_query, first, early_keys, None)
            else:
                # Both of theirs lie between ours.
                spans += _span(first + size, late, first, every_key, None)
        return spans

    def _with_prefixes(self, own: list[Span], keys: list[Run]) -> Spans:
        return with_prefixes(own, self.sequences.tree, self._local_runs(self.cp_rank), keys)

    def _local_runs(self, rank: int) -> list[Run]:
        """First token and number of tokens, on a rank's axis, of every sequence."""
        return [
            (start // self.cp_size, sum(self._real_tokens(rank, length, size)))
            for start, length, size in self._slots()
        ]

    def _chunks_of(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.cp_size - 1 - rank

    def _slots(self) -> list[tuple[int, int, int]]:
        """Start, length and chunk size of every sequence."""
        whole = self.sequences
        slots = zip(whole.starts, whole.lengths, whole.slots)
        return [(start, length, slot // (2 * self.cp_size)) for start, length, slot in slots]

    def _real_tokens(self, rank: int, length: int, size: int) -> tuple[int, int]:
        """Tokens that are not padding in a rank's early and late chunk."""
        early, late = self._chunks_of(rank)
        return _clamp(length - early * size, size), _clamp(length - late * size, size)


def _span(
    query_start: int, queries: int, key_start: int, keys: int, causal_offset: int | None
) -> list[Span]:
    """The span of these numbers of tokens; none where there is no pair."""
    if not queries or not keys:
        return []
    ends = query_start + queries, key_start + keys
    return [Span(query_start, ends[0], key_start, ends[1], causal_offset)]


def _clamp(count: int, most: int) -> int:
    return max(0, min(count, most))
