"""Shared prefixes as one run of keys: copies of every node's path, its prefixes before its own.

Indexers score runs of keys, and parity mode adds up keys in order from a sequence's first. In a
pack a node's prefixes are elsewhere, so index keys or latents are copied to where they make one run
with the node's own: for each node as many as a sequence has that ends there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from absorbed_mla.core_attention.backend import AttentionBackend
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Spans
from absorbed_mla.core_attention.types import (
    AttentionInputs,
    AttentionOutput,
    OutputGradient,
)
from absorbed_mla.prefix_tree import PrefixTree


@dataclass(frozen=True, eq=False)
class PathKeys:
    """The keys of every node's path, node after node.

    Attributes:
        spans: What this rank's queries see of them.
        tokens: int64 [K], where each is on the axis of the pack.
        order: int64 [K], the keys by their token; those of one token in their order.
        counts: int64 [S], how many keys each token of the pack is.
    """

    spans: Spans
    tokens: Tensor
    order: Tensor
    counts: Tensor

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
            tokens = torch.cat(runs)
            tables = tokens, tokens.argsort(stable=True), tokens.bincount(minlength=tree.num_tokens)
            return cls(Spans(moved), *(table.to(device) for table in tables))

    def copies(self, x: Tensor) -> Tensor:
        """Rows on this axis, given those on that of the pack."""
        return x.index_select(0, self.tokens)

    def sums(self, x: Tensor) -> Tensor:
        """Rows on the axis of the pack, the sums of :meth:`copies`, in the same order every time.

        Args:
            x: [K, ...], fp32 or fp64.
        """
        in_order = x.index_select(0, self.order)
        return torch.segment_reduce(in_order, "sum", lengths=self.counts, axis=0, unsafe=True)

    def on_pack(self, chosen: Tensor) -> Tensor:
        """A selection on the axis of the pack, given one on this axis; ascending as well."""
        tokens = self.tokens[chosen.clamp(min=0).long()].to(chosen.dtype)
        return tokens.masked_fill(chosen < 0, -1)


@dataclass(frozen=True, eq=False)
class PathBackend:
    """An ``AttentionBackend`` over shared prefixes whose sums are those of whole sequences.

    Each node is attended to as the last chunk of a sequence is, with all keys in one call.

    Attributes:
        backend: Computes it, in the absorbed form.
        tree: Of the pack.
    """

    backend: AttentionBackend
    tree: PrefixTree

    @property
    def name(self) -> str:
        """The backend's."""
        return self.backend.name

    @property
    def sinks(self) -> bool:
        """Whether the backend has them."""
        return self.backend.sinks

    def forward(self, inputs: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        """See ``AttentionBackend``."""
        return self.backend.forward(*self._on_paths(self._paths(inputs, rules), inputs, rules))

    def backward(
        self,
        grad: OutputGradient,
        output: AttentionOutput,
        inputs: AttentionInputs,
        rules: ScoreRules,
    ) -> AttentionInputs:
        """See ``AttentionBackend``."""
        paths = self._paths(inputs, rules)
        found = self.backend.backward(grad, output, *self._on_paths(paths, inputs, rules))
        keys = (paths.sums(x.to(output.lse.dtype)) for x in (found.k_content, found.k_rope))
        return AttentionInputs(found.q_content, found.q_rope, *keys, None)

    def _paths(self, inputs: AttentionInputs, rules: ScoreRules) -> PathKeys:
        return PathKeys.of(rules.spans, self.tree, inputs.k_content.device)

    @staticmethod
    def _on_paths(
        paths: PathKeys, inputs: AttentionInputs, rules: ScoreRules
    ) -> tuple[AttentionInputs, ScoreRules]:
        keys = paths.copies(inputs.k_content), paths.copies(inputs.k_rope)
        moved = AttentionInputs(inputs.q_content, inputs.q_rope, *keys, None)
        return moved, replace(rules, spans=paths.spans)
