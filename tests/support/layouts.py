"""Token layouts: a dense batch, a pack, a pack with padding between its sequences."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from absorbed_mla.prefix_tree import PrefixTree
from tests import oracle

LAYOUTS = ("sbhd", "thd", "thd_padded")
# Lengths, parents and ends of trees of shared prefixes. Two groups and a sequence of its own; nodes
# at four depths, of which two are empty, and sequences that end at an inner node or at the same.
TREES = {
    "groups": ((7, 2, 5, 1, 4, 3, 6), (None, 0, 0, 0, None, None, 5), None),
    "deep": ((5, 3, 0, 4, 1, 2, 0, 6), (None, 0, 1, 2, 2, 1, None, 6), (3, 1, 4, 5, 5, 7)),
}
TREES["deep_padded"] = TREES["deep"]


@dataclass(frozen=True)
class Layout:
    """Sequences in a batch or pack, as Megatron and as the oracle describe them.

    Attributes:
        tokens: Length of the token axis, padding included.
        batch: Sequences side by side; 1 for packs.
        sequences: The same for the oracle, over rows ``token * batch + b``.
        lengths: Tokens of each packed sequence, None for a dense batch.
        slots: Tokens from each packed sequence's start to the next one's, None without padding.
        tree: Of a pack of shared prefixes, whose nodes have these lengths and slots.
        truths: Cache of the oracle's results on this layout, for ``Execution.oracle``.
    """

    tokens: int
    batch: int
    sequences: list[oracle.TokenSequence]
    lengths: tuple[int, ...] | None = None
    slots: tuple[int, ...] | None = None
    tree: PrefixTree | None = None
    truths: dict[tuple, list] = field(default_factory=dict, compare=False, repr=False)

    def packed_seq_params(self, device: torch.device) -> PackedSeqParams | None:
        """Megatron's description of the pack, None for a dense batch."""
        if self.lengths is None:
            return None
        if self.tree is not None:
            return self.tree.packed_seq_params(device)
        bounds = _boundaries(self.lengths, device)
        padded = None if self.slots is None else _boundaries(self.slots, device)
        longest = max(self.slots or self.lengths)
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

    def random_rows(self, hidden: int, seed: int) -> Tensor:
        """Float64 [tokens, batch, hidden]; padding holds values of the same size as tokens do."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.tokens, self.batch, hidden)
        return torch.randn(shape, generator=generator, dtype=torch.float64)


def dense(tokens: int, batch: int, visible: Tensor | None = None) -> Layout:
    """``batch`` sequences of ``tokens``; causal unless ``visible`` [batch, S, S] says otherwise."""
    return Layout(tokens, batch, oracle.batch(tokens, batch, visible))


def packed(lengths: Sequence[int], slots: Sequence[int] | None = None) -> Layout:
    """A pack of causal sequences; ``slots`` are their lengths with padding."""
    return Layout(
        tokens=sum(slots or lengths),
        batch=1,
        sequences=oracle.pack(lengths, slots),
        lengths=tuple(lengths),
        slots=None if slots is None else tuple(slots),
    )


def shared(tree: PrefixTree) -> Layout:
    """A pack of shared prefixes; for the oracle each sequence is whole."""
    rows = tree.expand().split(tree.sequence_lengths)
    return Layout(
        tokens=tree.num_tokens,
        batch=1,
        sequences=[oracle.TokenSequence(own, oracle.causal(len(own))) for own in rows],
        lengths=tree.lengths,
        slots=tree.padded_lengths,
        tree=tree,
    )


@functools.cache
def tree_layout(name: str, chunks: int) -> Layout:
    """A layout of ``TREES``, whose nodes context parallelism can cut into ``chunks``."""
    lengths, parents, ends = TREES[name]
    padded = [-(-n // chunks) * chunks for n in lengths]
    if "padded" not in name:
        lengths = padded
    else:
        # Padding within nodes, none, a chunk of it, nothing but it.
        padded = [n + (i % 3 == 2) * chunks for i, n in enumerate(padded)]
    return shared(PrefixTree(lengths, parents, ends, padded))


@functools.cache
def grid_layout(name: str, divisible: bool) -> Layout:
    """A layout of ``LAYOUTS``; with ``divisible`` its number of tokens is a multiple of 4."""
    if name == "sbhd":
        return dense(12 if divisible else 13, 2)
    # Odd lengths, a single token and an empty sequence; the last slot ends in padding too.
    if name == "thd":
        return packed((5, 1, 0, 6 if divisible else 7))
    return packed((5, 1, 0, 4), (6, 3, 2, 5 if divisible else 6))


@functools.cache
def cut_layout(name: str, cp_size: int) -> Layout:
    """Like :func:`grid_layout`, with sequences that context parallelism can split."""
    chunks = 2 * cp_size
    if name == "sbhd":
        return dense(2 * chunks, 2)
    # An empty sequence, a chunk of one token, longer chunks.
    if name == "thd":
        return packed((chunks, 0, 3 * chunks, 2 * chunks))
    # Padding: part of the last chunk, all chunks but the first, all chunks; starting inside a
    # chunk and at its boundary.
    slots = (2 * chunks, chunks, chunks, 3 * chunks, chunks)
    return packed((2 * chunks - 1, 1, 0, chunks + 1, chunks), slots)


def cut_tokens(layout: Layout, cp_size: int, rank: int) -> list[int]:
    """The tokens of one context-parallel rank, listed one by one."""
    if cp_size == 1:
        return [*range(layout.tokens)]
    tokens_of_rank, start = [], 0
    for slot in layout.slots or layout.lengths or (layout.tokens,):
        tokens = [*range(start, start + slot)]
        size = slot // (2 * cp_size)
        chunks = [tokens[i * size : (i + 1) * size] for i in range(2 * cp_size)]
        tokens_of_rank += chunks[rank] + chunks[2 * cp_size - 1 - rank]
        start += slot
    return tokens_of_rank


def _boundaries(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
