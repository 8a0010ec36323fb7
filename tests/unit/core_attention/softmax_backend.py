"""A new attention backend in a file of its own, as CONTRIBUTING.md describes: nothing else changes.

It computes the absorbed form with one softmax over all keys, in the dtype of the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from absorbed_mla.core_attention.backend import AttentionRequest
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient


class SoftmaxBackend:
    """Counts its calls, so that a test can see that it ran."""

    name = "softmax"
    summary = "one softmax over all keys"
    forms = ("absorbed",)
    # Faster than anything else, as far as "auto" is told.
    rates: Mapping[str, tuple[float, float]] = {"cpu": (1e6, 1e6), "gpu": (1e6, 1e6)}
    forwards = backwards = 0

    def why_not(self, request: AttentionRequest) -> str | None:
        if request.form != "absorbed":
            return "it attends over the latent (form='absorbed')"
        return "it takes no attention_mask and drops nothing" if request.masked else None

    def forward(self, inputs: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        self.forwards += 1
        scores = self._scores(inputs, rules)
        lse = scores.logsumexp(-1)
        probs = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        out = torch.einsum("bnqk,kbc->qbnc", probs, inputs.k_content[:, :, 0])
        return AttentionOutput(out, lse.permute(2, 0, 1))

    def backward(
        self,
        grad: OutputGradient,
        output: AttentionOutput,
        inputs: AttentionInputs,
        rules: ScoreRules,
    ) -> AttentionInputs:
        self.backwards += 1
        q_content, q_rope, k_content, k_rope, _ = inputs
        latent = k_content[:, :, 0]
        lse = output.lse.permute(1, 2, 0).masked_fill(
            output.lse.permute(1, 2, 0) == -torch.inf, 0.0
        )
        probs = torch.exp(self._scores(inputs, rules) - lse[..., None])
        dprobs = torch.einsum("qbnc,kbc->bnqk", grad.out, latent)
        delta = (grad.out * output.out).sum(-1).permute(1, 2, 0)[..., None]
        dscores = probs * (dprobs - delta) * rules.scale
        dlatent = torch.einsum("bnqk,qbnc->kbc", dscores, q_content)
        dlatent = dlatent + torch.einsum("bnqk,qbnc->kbc", probs, grad.out)
        return AttentionInputs(
            torch.einsum("bnqk,kbc->qbnc", dscores, latent),
            torch.einsum("bnqk,kbr->qbnr", dscores, k_rope),
            dlatent.unsqueeze(2),
            torch.einsum("bnqk,qbnr->kbr", dscores, q_rope),
            None,
        )

    def _scores(self, inputs: AttentionInputs, rules: ScoreRules) -> Tensor:
        """[B, N, Q, K], -inf where a query does not see a key."""
        q = torch.cat((inputs.q_content, inputs.q_rope), dim=-1)
        k = torch.cat((inputs.k_content[:, :, 0], inputs.k_rope), dim=-1)
        seen = torch.zeros(len(q), len(k), dtype=torch.bool, device=q.device)
        for span in rules.spans:
            pairs = torch.ones_like(seen[span.queries, span.keys])
            if span.causal_offset is not None:
                pairs = pairs.tril(span.causal_offset)
            seen[span.queries, span.keys] = pairs
        scores = torch.einsum("qbnd,kbd->bnqk", q, k) * rules.scale
        return scores.masked_fill(~seen, -torch.inf)


ENTRY = SoftmaxBackend()
