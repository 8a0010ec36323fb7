"""Which tokens of a batch this process holds."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from megatron.core import parallel_state
from torch import Tensor

from absorbed_mla.context_parallel.layout import ContextParallelLayout
from absorbed_mla.sequences import SequenceLayout


@dataclass(frozen=True)
class ContextParallelPart:
    """One context-parallel rank's part of every sequence; by default all of it.

    Attributes:
        size: Context-parallel ranks.
        rank: This one.
        sequence_parallel_size: Ranks that cut each part once more, in equal pieces.
    """

    size: int = 1
    rank: int = 0
    sequence_parallel_size: int = 1

    @property
    def slot_multiple(self) -> int:
        """What the length of every sequence must be a multiple of."""
        return 2 * self.size if self.size > 1 else 1

    @property
    def total_multiple(self) -> int:
        """What the number of tokens of all sequences must be a multiple of."""
        return self.slot_multiple * self.sequence_parallel_size if self.size > 1 else 1

    def of(self, values: Tensor, sequences: SequenceLayout) -> Tensor:
        """Columns of ``values`` [b, S] that belong to this rank, [b, S / size]."""
        if self.size == 1:
            return values
        return values[:, ContextParallelLayout(sequences, self.size, self.rank).tokens()]


def own_part(args: argparse.Namespace) -> ContextParallelPart:
    """The part of this process, from Megatron's groups."""
    return ContextParallelPart(
        size=parallel_state.get_context_parallel_world_size(),
        rank=parallel_state.get_context_parallel_rank(),
        sequence_parallel_size=args.tensor_model_parallel_size if args.sequence_parallel else 1,
    )
