"""Attention over shared prefixes by any attention backend, one call for each depth of the tree.

Kernels take spans of which a query is in one. A token sees its own node and one of each depth above
it; these are computed one after the other, each for the queries that have such a node, and merged
by their LSE. Where the backward of a backend adds up what a query gets from several spans, it is
one call: the queries that see a node, its own tokens and all below it, are one run of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from absorbed_mla.core_attention.backend import AttentionBackend
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Spans
from absorbed_mla.core_attention.merge import merge_into
from absorbed_mla.core_attention.types import (
    AttentionInputs,
    AttentionOutput,
    OutputGradient,
)


@dataclass(frozen=True, eq=False)
class SharedPrefixBackend:
    """An ``AttentionBackend`` that also attends to shared prefixes, the spans' ``further``.

    Attributes:
        backend: Computes each part.
    """

    backend: AttentionBackend
    sinks = False

    @property
    def name(self) -> str:
        """The backend's."""
        return self.backend.name

    def forward(self, inputs: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        """See ``AttentionBackend``."""
        own = AttentionOutput(*self.backend.forward(inputs, rules))
        levels = _levels(rules.spans)
        # Several parts are summed in the dtype of the LSE.
        out, lse = own.out.to(own.lse.dtype) if len(levels) > 1 else own.out, own.lse
        for level in levels:
            part = self.backend.forward(level.inputs(inputs), replace(rules, spans=level.spans))
            # In place, but for the LSE: several threads of the kernel read the same one.
            rows, rows_lse = out[level.queries], lse[level.queries]
            merge_into(rows, rows_lse, (rows, rows_lse.clone()), part)
        return AttentionOutput(out.to(own.out.dtype), lse)

    def backward(
        self,
        grad: OutputGradient,
        output: AttentionOutput,
        inputs: AttentionInputs,
        rules: ScoreRules,
    ) -> AttentionInputs:
        """See ``AttentionBackend``: output and LSE are those over the keys of all parts."""
        together = joined(rules.spans) if self.backend.adds_query_gradients else None
        if together is not None:
            rules = replace(rules, spans=together)
            return self.backend.backward(grad, output, inputs, rules)
        found = self.backend.backward(grad, output, inputs, rules)
        for level in _levels(rules.spans):
            rows = level.queries
            part = self.backend.backward(
                OutputGradient(grad.out[rows], None if grad.lse is None else grad.lse[rows]),
                AttentionOutput(output.out[rows], output.lse[rows]),
                level.inputs(inputs),
                replace(rules, spans=level.spans),
            )
            for total, share in zip(level.inputs(found), part):
                if total is not None and total.numel():
                    total.add_(share)
        return found


@dataclass(frozen=True)
class _Level:
    """What queries see of the nodes of one depth above theirs.

    Attributes:
        queries: From the first query to the last.
        keys: From the first key to the last.
        spans: Counted from these.
    """

    queries: slice
    keys: slice
    spans: Spans

    @classmethod
    def of(cls, spans: Spans) -> _Level:
        query, key = min(s.query_start for s in spans), min(s.key_start for s in spans)
        queries = slice(query, max(s.query_end for s in spans))
        keys = slice(key, max(s.key_end for s in spans))
        moved = (
            replace(
                span,
                query_start=span.query_start - query,
                query_end=span.query_end - query,
                key_start=span.key_start - key,
                key_end=span.key_end - key,
            )
            for span in spans
        )
        return cls(queries, keys, Spans(moved))

    def inputs(self, whole: AttentionInputs) -> AttentionInputs:
        """Its queries and keys, as views."""
        rows = (self.queries, self.queries, self.keys, self.keys, self.keys)
        return AttentionInputs(*(x if x is None else x[of] for x, of in zip(whole, rows)))


def _levels(spans: Spans) -> tuple[_Level, ...]:
    """The further spans, made once for all layers."""
    return spans.tables.get("levels", lambda: tuple(map(_Level.of, spans.further)))


def joined(spans: Spans) -> Spans | None:
    """Spans extended to the queries of their ``further`` ones; a query may be in several.

    Queries right behind those of a node see all of it: they continue its span.

    Returns:
        None where they do not: behind padding, and for parts of nodes on context-parallel ranks.
    """
    return spans.tables.get("joined", lambda: _join(spans))


def _join(spans: Spans) -> Spans | None:
    by_keys = {(span.key_start, span.key_end): span for span in spans}
    for span in chain.from_iterable(spans.further):
        keys = span.key_start, span.key_end
        upper = by_keys.get(keys)
        if upper is None or upper.query_end != span.query_start:
            return None
        offset = upper.causal_offset
        if offset is not None and upper.num_queries + offset < upper.num_keys:
            return None
        by_keys[keys] = replace(upper, query_end=span.query_end)
    return Spans(by_keys.values()) if len(by_keys) == len(spans) else None
