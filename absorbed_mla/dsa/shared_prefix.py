"""Indexers over shared prefixes: an axis of keys on which every node's prefixes are before it.

An indexer scores runs of keys. In a pack a node's prefixes are elsewhere, so index keys, which are
small, are copied to where they make one run with the node's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from absorbed_mla.core_attention.masks.spans import Spans
from absorbed_mla.dsa.index_vectors import IndexVectors
from absorbed_mla.prefix_tree import PrefixTree


@dataclass(frozen=True, eq=False)
class PathKeys:
    """The keys of every node's path, node after node.

    Attributes:
        spans: What this rank's queries see of them.
        tokens: int64 [K], where each is on the axis of the pack.
    """

    spans: Spans
    tokens: Tensor

    @classmethod
    def of(cls, spans: Spans, tree: PrefixTree, device: torch.device) -> PathKeys:
        """The axis of a pack, made once for all layers.

        Args:
            spans: What queries see of their own nodes; keys are on the axis of the pack.
            tree: Of the pack.
            device: Where the tensors are.
        """
        return spans.tables.get(("keys of paths", device), lambda: cls._make(spans, tree, device))

    @classmethod
    def _make(cls, spans: Spans, tree: PrefixTree, device: torch.device) -> PathKeys:
        nodes = range(len(tree.lengths))
        runs = [tree.rows(node) for node in nodes]
        starts = (0, *accumulate(len(run) for run in runs))
        # Empty nodes are in no span.
        at = {tree.starts[node]: node for node in nodes if tree.lengths[node]}
        moved = []
        for span in spans:
            node = at[span.key_start]
            assert span.causal_offset is not None, "shared prefixes are causal"
            base, start = tree.bases[node], starts[node]
            end, offset = start + base + span.num_keys, span.causal_offset + base
            moved.append(replace(span, key_start=start, key_end=end, causal_offset=offset))
        # A table made under inference mode must serve training as well.
        with torch.inference_mode(False):
            return cls(Spans(moved), torch.cat(runs).to(device))

    def index(self, index: IndexVectors) -> IndexVectors:
        """Index vectors with keys on this axis, given those on that of the pack."""
        return index._replace(key=index.key.index_select(0, self.tokens))

    def on_pack(self, chosen: Tensor) -> Tensor:
        """A selection on the axis of the pack, given one on this axis; ascending as well."""
        tokens = self.tokens[chosen.clamp(min=0).long()].to(chosen.dtype)
        return tokens.masked_fill(chosen < 0, -1)
