"""Blocks of the vocabulary, and the memory in which sampling kernels leave what they count.

Of every block and every pass over the logits that finds thresholds there are ``COLUMNS`` counts
with sums of weights: of the tokens whose keys reach each of so many edges, the first of which all
keys reach that are still looked at, and the last of which none of those does. Of every row and pass
there are the edges, and the sums and the counts over all blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from absorbed_mla.kernels.sampling.weights import unused_bits
from absorbed_mla.kernels.scratch import not_filled

# Tokens; 2,048 weights of 2**40 and their number fit into an int64 (``weights.COUNT``).
BLOCK = 2048
# Of a program; of those that count, whose threads have more tokens and so fewer sums to exchange.
WARPS, COUNTING_WARPS = 4, 2
# Parts into which a pass divides the range of keys that may be the threshold.
WAYS = 16
COLUMNS = WAYS + 1
# Edges, sums and counts of a row and pass.
RECORD = 3 * COLUMNS
# Of a row besides: its largest logit with the token, and the sum of weights that top_p wants.
HEAD = 2
# Passes leave the counts of blocks in three places: the first in one, later ones by turns in two.
PLACES = 3


class VocabularyBlocks(NamedTuple):
    """The blocks of rows of logits, and memory for the kernels.

    Attributes:
        maxima: int64 [rows, blocks]: the bits in order of the largest logit, above what is the
            larger the smaller the number of its token is.
        counted: int64 [PLACES, rows, blocks, COLUMNS].
        records: int64 [rows, HEAD + (1 + 2 * passes) * RECORD]; see ``HEAD`` and ``RECORD``.
        rows: Number of rows.
        vocabulary: Tokens of a row.
        size: Tokens of a block.
        count: Blocks of a row.
        passes: After the first, for top_k, and as many for top_p; even.
    """

    maxima: Tensor
    counted: Tensor
    records: Tensor
    rows: int
    vocabulary: int
    size: int
    count: int
    passes: int

    @classmethod
    def of(cls, logits: Tensor, size: int, *, filters: bool = False) -> VocabularyBlocks:
        """For logits [rows, vocabulary].

        Args:
            logits: What is drawn from.
            size: Tokens of a block: a power of two, at most ``BLOCK``.
            filters: Whether there are thresholds to find.
        """
        rows, vocabulary = logits.shape
        count = -(-vocabulary // size)
        # 4 bits of the keys in a pass. Two searches take the places by turns: an even number.
        passes = 2 * -(-(32 - unused_bits(logits.dtype)) // 8)
        record = HEAD + (1 + 2 * passes) * RECORD if filters else HEAD
        places, columns = (PLACES, COLUMNS) if filters else (1, 1)
        sizes = rows * count, places * rows * count * columns, rows * record
        with not_filled():
            memory = torch.empty(sum(sizes), dtype=torch.int64, device=logits.device)
        return cls(*memory.split(sizes), rows, vocabulary, size, count, passes)

    @property
    def width(self) -> int:
        """Blocks, rounded up to a power of two."""
        return 1 << (self.count - 1).bit_length()
