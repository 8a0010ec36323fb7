"""Attention over shared prefixes by any attention backend, one call for each depth of the tree.

Kernels take spans of which a query is in one. A token sees its own node and one of each depth above
it; these are computed one after the other and merged by their LSE.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from absorbed_mla.core_attention.backend import AttentionBackend
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.merge import merge, merge_into
from absorbed_mla.core_attention.types import (
    AttentionInputs,
    AttentionOutput,
    OutputGradient,
)


@dataclass(frozen=True, eq=False)
class SharedPrefixBackend:
    """An ``AttentionBackend`` that sees the ``further`` spans, too.

    Attributes:
        backend: Computes each part.
    """

    backend: AttentionBackend

    @property
    def name(self) -> str:
        """The backend's."""
        return self.backend.name

    def forward(self, inputs: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        """See ``AttentionBackend``."""
        own = total = AttentionOutput(*self.backend.forward(inputs, rules))
        if not rules.spans.further:
            return own
        *levels, last = (
            self.backend.forward(inputs, replace(rules, spans=s)) for s in rules.spans.further
        )
        for level in levels:
            # Summed in the dtype of the LSE; the last merge rounds.
            total = AttentionOutput(*merge(total.out.to(own.lse.dtype), total.lse, *level))
        found = AttentionOutput(torch.empty_like(own.out), torch.empty_like(own.lse))
        merge_into(*found, total, last)
        return found

    def backward(
        self,
        grad: OutputGradient,
        output: AttentionOutput,
        inputs: AttentionInputs,
        rules: ScoreRules,
    ) -> AttentionInputs:
        """See ``AttentionBackend``: output and LSE are those over the keys of all parts."""
        found = self.backend.backward(grad, output, inputs, rules)
        for spans in rules.spans.further:
            part = self.backend.backward(grad, output, inputs, replace(rules, spans=spans))
            for total, share in zip(found, part):
                if total is not None and total.numel():
                    total.add_(share)
        return found
