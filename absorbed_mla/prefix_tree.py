"""Packs of sequences that share prefixes: a prefix stands once, and all its continuations see it.

In RL the answers to a prompt form a group; trees of prefixes come from turns of agents. Each node
of the tree is a run of tokens in the pack. A token sees the nodes above its own, and its own node
up to itself; its position goes on from the end of the node above.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass(frozen=True)
class PrefixTree:
    """Nodes of shared tokens in the order of the pack, which is depth-first.

    Attributes:
        lengths: Tokens of each node.
        parents: The node right above each one; None for a root, a group's prompt or a sequence that
            shares nothing.
        ends: The node that each sequence ends with, of any depth; None, as an argument, for the
            leaves in their order.
        padded_lengths: Tokens of each node with the padding after it; None, as an argument, for
            none.

    Raises:
        ValueError: If the nodes are not in depth-first order, a leaf is no sequence's end, or
            lengths do not fit.
    """

    lengths: tuple[int, ...]
    parents: tuple[int | None, ...]
    ends: tuple[int, ...] | None = None
    padded_lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        set_field = functools.partial(object.__setattr__, self)
        set_field("lengths", tuple(map(int, self.lengths)))
        set_field("parents", tuple(self.parents))
        padded = self.lengths if self.padded_lengths is None else self.padded_lengths
        set_field("padded_lengths", tuple(map(int, padded)))
        count = len(self.lengths)
        if not count or len(self.parents) != count or len(self.padded_lengths) != count:
            raise ValueError(
                "a PrefixTree needs lengths, parents and padded_lengths of one number of nodes, "
                f"at least 1; got {count}, {len(self.parents)} and {len(self.padded_lengths)}"
            )
        for node, (length, padded) in enumerate(zip(self.lengths, self.padded_lengths)):
            if not 0 <= length <= padded:
                raise ValueError(
                    f"lengths must be from 0 to padded_lengths, got {length} and {padded} for "
                    f"node {node}"
                )
        self._require_depth_first()
        leaves = [i for i in range(count) if self.subtree_ends[i] == i + 1]
        set_field("ends", tuple(leaves if self.ends is None else self.ends))
        if not set(leaves) <= set(self.ends) <= set(range(count)):
            raise ValueError(
                f"ends must be nodes, every leaf among them ({leaves}); got {list(self.ends)}"
            )

    def _require_depth_first(self) -> None:
        path: list[int] = []
        for node, parent in enumerate(self.parents):
            while path and path[-1] != parent:
                path.pop()
            if not path and parent is not None:
                raise ValueError(
                    "parents must be in depth-first order, each None, the node before or one above "
                    f"that; got {parent} for node {node}"
                )
            path.append(node)

    @classmethod
    def of_groups(cls, groups: Sequence[tuple[int, Sequence[int]]]) -> PrefixTree:
        """Groups of answers to one prompt each, given by their numbers of tokens.

        Args:
            groups: Tokens of a group's prompt, and of each of its answers.
        """
        lengths: list[int] = []
        parents: list[int | None] = []
        for prompt, answers in groups:
            root = len(lengths)
            lengths += [prompt, *answers]
            parents += [None] + [root] * len(answers)
        return cls(tuple(lengths), tuple(parents))

    @classmethod
    def from_token_ids(
        cls,
        sequences: Sequence[Sequence[int]],
        *,
        min_shared: int = 1,
        multiple: int = 1,
        pad_token_id: int = 0,
    ) -> tuple[PrefixTree, Tensor]:
        """Find the prefixes that sequences share.

        Args:
            sequences: Token ids of each sequence, prompt and answer; ``ends`` keeps their order.
            min_shared: A node of several sequences has this many tokens or more: shorter ones, such
                as a common first token, cost more than they save.
            multiple: Nodes are padded to a multiple of it, as context parallelism needs (2 cp).
            pad_token_id: Of the padding.

        Returns:
            The tree, and the token ids of the pack, int64 [T].

        Raises:
            ValueError: If there is no sequence, or an empty one.
        """
        sequences = [[int(token) for token in sequence] for sequence in sequences]
        if not sequences or not all(sequences):
            raise ValueError(
                "sequences must be lists of 1 token or more, at least one; got "
                f"{[len(sequence) for sequence in sequences]} tokens"
            )
        lengths: list[int] = []
        parents: list[int | None] = []
        ends = [0] * len(sequences)
        runs: list[list[int]] = []
        # Members of a node to be made, where its tokens begin in them, and its parent.
        todo = _by_token(sequences, list(range(len(sequences))), 0, 0, None)
        while todo:
            members, start, shared, parent = todo.pop()
            end = _common_length(sequences, members, shared)
            finished = [i for i in members if len(sequences[i]) == end]
            if len(finished) < len(members) and end - start < min_shared:
                if finished:
                    members = [i for i in members if i not in finished]
                    todo += _by_token(sequences, members, end, start, parent)
                    members = finished
                else:
                    todo += _by_token(sequences, members, end, start, parent)
                    continue
            node = len(lengths)
            runs.append(sequences[members[0]][start:end])
            lengths.append(end - start)
            parents.append(parent)
            for i in finished:
                ends[i] = node
            if len(finished) < len(members):
                members = [i for i in members if len(sequences[i]) > end]
                todo += _by_token(sequences, members, end, end, node)
        padded = tuple(-(-length // multiple) * multiple for length in lengths)
        tokens = [r + [pad_token_id] * (n - len(r)) for r, n in zip(runs, padded)]
        tree = cls(tuple(lengths), tuple(parents), tuple(ends), padded)
        return tree, torch.tensor(list(chain.from_iterable(tokens)))

    @property
    def num_tokens(self) -> int:
        """Tokens T of the pack, padding included."""
        return sum(self.padded_lengths)

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """First token of each node in the pack."""
        return (0, *accumulate(self.padded_lengths))[:-1]

    @functools.cached_property
    def bases(self) -> tuple[int, ...]:
        """Position of each node's first token: the tokens of all nodes above it."""
        bases: list[int] = []
        for parent in self.parents:
            bases.append(0 if parent is None else bases[parent] + self.lengths[parent])
        return tuple(bases)

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """Number of nodes above each one."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent is None else depths[parent] + 1)
        return tuple(depths)

    @functools.cached_property
    def subtree_ends(self) -> tuple[int, ...]:
        """One more than the last node below each one, or than itself."""
        ends = [node + 1 for node in range(len(self.parents))]
        for node in reversed(range(len(ends))):
            parent = self.parents[node]
            if parent is not None:
                ends[parent] = max(ends[parent], ends[node])
        return tuple(ends)

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the root to ``node``, which is the last of them."""
        nodes: list[int] = []
        above: int | None = node
        while above is not None:
            nodes.append(above)
            above = self.parents[above]
        return tuple(reversed(nodes))

    @functools.cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of each sequence, in the order of ``ends``."""
        return tuple(self.path(node) for node in self.ends)

    @functools.cached_property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence, its prefixes included."""
        return tuple(self.bases[node] + self.lengths[node] for node in self.ends)

    def position_ids(self) -> Tensor:
        """Position of each token in its sequences, int64 [T]; padding continues the count."""
        runs = (torch.arange(base, base + n) for base, n in zip(self.bases, self.padded_lengths))
        return torch.cat(list(runs))

    def expand(self) -> Tensor:
        """Where each token of the sequences, one after the other, is in the pack, int64 [U]."""
        return torch.cat([self.rows(node) for node in self.ends])

    def rows(self, node: int) -> Tensor:
        """Where the tokens from the root to the end of ``node`` are in the pack, int64."""
        runs = ((self.starts[i], self.lengths[i]) for i in self.path(node))
        return torch.cat([torch.arange(start, start + count) for start, count in runs])

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of sequences that each node is part of."""
        found = [0] * len(self.lengths)
        for path in self.paths:
            for node in path:
                found[node] += 1
        return tuple(found)

    def token_counts(self) -> Tensor:
        """Number of sequences that each token is part of, int64 [T]; padding as its node."""
        return torch.tensor(self.counts).repeat_interleave(torch.tensor(self.padded_lengths))

    def packed_seq_params(self, device: torch.device | str = "cpu") -> SharedPrefixParams:
        """Megatron's ``packed_seq_params`` of the pack, with the boundaries on ``device``."""
        bounds, padded = (
            torch.tensor([0, *accumulate(n)], dtype=torch.int32, device=device)
            for n in (self.lengths, self.padded_lengths)
        )
        padded = None if self.padded_lengths == self.lengths else padded
        longest = max(base + n for base, n in zip(self.bases, self.padded_lengths))
        return SharedPrefixParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            prefix_tree=self,
        )


@dataclass
class SharedPrefixParams(PackedSeqParams):
    """Megatron's ``PackedSeqParams`` of a pack in which prefixes stand once.

    ``cu_seqlens`` are the boundaries of the tree's nodes.

    Attributes:
        prefix_tree: Which nodes continue which.
    """

    prefix_tree: PrefixTree | None = None


def _by_token(
    sequences: Sequence[Sequence[int]],
    members: list[int],
    place: int,
    start: int,
    parent: int | None,
) -> list[tuple[list[int], int, int, int | None]]:
    """Members by their token at ``place``, the first to be popped last: nodes to be made."""
    groups: dict[int, list[int]] = {}
    for i in members:
        groups.setdefault(sequences[i][place], []).append(i)
    return [(group, start, place, parent) for group in reversed(groups.values())]


def _common_length(sequences: Sequence[Sequence[int]], members: list[int], start: int) -> int:
    """Tokens that all members have in common, known to be ``start`` or more."""
    # What the first and the last in lexicographic order have in common all have.
    first, last = (choose(sequences[i] for i in members) for choose in (min, max))
    pairs = enumerate(zip(first[start:], last[start:]), start)
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(last)))
