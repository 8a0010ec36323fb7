"""Scaled dot-product attention in plain PyTorch: the reference that every kernel is tested against.

Scores are held for one chunk of query tokens at a time, in forward and backward; backward
recomputes them from the log-sum-exp (FlashAttention, arXiv:2205.14135). Arithmetic is fp32 (fp64
for fp64 inputs), whatever the input dtype.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from absorbed_mla.core_attention.backend import AttentionRequest
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient


def reference_forward(inputs: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
    """Attention, without autograd.

    Returns:
        Output and LSE in fp32 (fp64). A token that may attend to nothing, such as padding between
        sequences, gets output 0 and LSE -inf.
    """
    q_content, q_rope, k_content, k_rope, value = inputs
    v = k_content if value is None else value
    compute = torch.promote_types(q_content.dtype, torch.float32)
    out = q_content.new_zeros(*q_content.shape[:3], v.shape[-1], dtype=compute)
    lse = q_content.new_full(q_content.shape[:3], -torch.inf, dtype=compute)
    for chunk in rules.chunks():
        q, k = chunk.queries, chunk.keys
        scores = _scores(
            q_content[q].to(compute), q_rope[q].to(compute), k_content[k], k_rope[k], rules.scale
        )
        scores = rules.mask(scores, chunk)
        if rules.max_logits is not None and scores.shape[-1]:
            rules.record(scores.amax(-1).permute(2, 0, 1))
        chunk_lse, probs = _softmax(scores)
        keep = rules.keep_mask(probs, chunk)
        if keep is not None:
            probs = probs * keep
        out[q] = _weighted_sum(probs, v[k].to(compute))
        lse[q] = chunk_lse.permute(2, 0, 1)
    return AttentionOutput(out, lse)


def reference_backward(
    grad: OutputGradient, output: AttentionOutput, inputs: AttentionInputs, rules: ScoreRules
) -> AttentionInputs:
    """Gradients of the inputs of :func:`reference_forward`.

    The keys may be a part of those that ``output`` is the attention over: the gradient of the
    queries is then this part's share, the gradients of the keys are complete. A query may be in
    several spans.

    Returns:
        In fp32 (fp64); None for the value where it is ``k_content``.
    """
    q_content, q_rope, k_content, k_rope, value = inputs
    out, lse = output
    compute = lse.dtype
    v = k_content if value is None else value
    dq_content, dq_rope, dk_content, dk_rope = (
        torch.zeros_like(x, dtype=compute) for x in inputs[:4]
    )
    dv = dk_content if value is None else torch.zeros_like(value, dtype=compute)
    for chunk in rules.chunks():
        q, k = chunk.queries, chunk.keys
        qc, qr = q_content[q].to(compute), q_rope[q].to(compute)
        kc, kr, do = k_content[k].to(compute), k_rope[k].to(compute), grad.out[q].to(compute)
        scores = rules.mask(_scores(qc, qr, kc, kr, rules.scale), chunk)
        probs = _probabilities(scores, lse[q].permute(1, 2, 0))
        keep = rules.keep_mask(probs, chunk)
        dropped = probs if keep is None else probs * keep
        dv[k] += _key_sum(dropped, do, v.shape[2])
        dprobs = _pair_products(do, v[k].to(compute))
        if keep is not None:
            dprobs = dprobs * keep
        # delta is the row sum of probs * dprobs; an LSE gradient enters the same row term.
        delta = (out[q].to(compute) * do).sum(-1)
        if grad.lse is not None:
            delta = delta - grad.lse[q]
        dscores = probs * (dprobs - delta.permute(1, 2, 0)[..., None]) * rules.scale
        dq_content[q] += _weighted_sum(dscores, kc)
        dk_content[k] += _key_sum(dscores, qc, k_content.shape[2])
        if kr.shape[-1]:
            dq_rope[q] += torch.einsum("bnqk,kbr->qbnr", dscores, kr)
            dk_rope[k] += torch.einsum("bnqk,qbnr->kbr", dscores, qr)
    return AttentionInputs(dq_content, dq_rope, dk_content, dk_rope, None if value is None else dv)


def _scores(q_content: Tensor, q_rope: Tensor, k_content: Tensor, k_rope: Tensor, scale: float):
    """Scaled scores [B, N, Q, K] of a chunk, in the dtype of the queries."""
    scores = _pair_products(q_content, k_content.to(q_content.dtype))
    if k_rope.shape[-1]:
        scores = scores + torch.einsum("qbnr,kbr->bnqk", q_rope, k_rope.to(q_rope.dtype))
    return scores * scale


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Row-wise log-sum-exp [B, N, Q] and probabilities; a fully masked row gets -inf and zeros."""
    lse = torch.logsumexp(scores, dim=-1)
    return lse, _probabilities(scores, lse)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    # -inf - -inf would be NaN; a row without keys has no probability to distribute.
    return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])


def _pair_products(left: Tensor, right: Tensor) -> Tensor:
    """Dot products [B, N, Q, K] of ``left`` [Q, B, N, D] with ``right`` [K, B, 1 or N, D]."""
    if right.shape[2] == 1:
        return torch.einsum("qbnd,kbd->bnqk", left, right[:, :, 0])
    return torch.einsum("qbnd,kbnd->bnqk", left, right)


def _weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """Sum [Q, B, N, D] of ``rows`` [K, B, 1 or N, D] with ``weights`` [B, N, Q, K]."""
    if rows.shape[2] == 1:
        return torch.einsum("bnqk,kbd->qbnd", weights, rows[:, :, 0])
    return torch.einsum("bnqk,kbnd->qbnd", weights, rows)


def _key_sum(weights: Tensor, rows: Tensor, heads: int) -> Tensor:
    """Sum [K, B, heads, D] of ``rows`` [Q, B, N, D] with ``weights`` [B, N, Q, K].

    Over all N as well where they share one key head.
    """
    if heads == 1:
        return torch.einsum("bnqk,qbnd->kbd", weights, rows).unsqueeze(2)
    return torch.einsum("bnqk,qbnd->kbnd", weights, rows)


def reference_one_pair(
    q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[AttentionInputs, ScoreRules]:
    """Inputs and rules of one query that sees one key, which cuDNN's backward refuses."""
    return AttentionInputs.multi_head(q, k, v), ScoreRules(scale, Spans([Span(0, 1, 0, 1, None)]))


def reference_one_pair_gradient(
    grad_out: Tensor, output: AttentionOutput, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the query, key and value of :func:`reference_one_pair`."""
    grad = OutputGradient(grad_out, None)
    found = reference_backward(grad, output, *reference_one_pair(q, k, v, scale))
    assert found.value is not None  # as the value is not the key
    return found.q_content, found.k_content, found.value


class ReferenceBackend:
    """Plain PyTorch in fp32 (fp64 for fp64 inputs)."""

    name = "reference"
    summary = "plain PyTorch in fp32, any device, dtype, mask and dropout"
    forms = ("absorbed", "expanded")
    # On the H200 a guess. Elsewhere it is slow beside any kernel of a GPU.
    rates: Mapping[str, tuple[float, float]] = {"NVIDIA H200": (15.0, 15.0), "gpu": (0.05, 0.05)}
    searches_max_logits = False
    reads_device_spans = False
    adds_query_gradients = True
    windows = False
    sinks = False
    forward = staticmethod(reference_forward)
    backward = staticmethod(reference_backward)

    def why_not(self, request: AttentionRequest) -> None:
        """Nothing is refused."""


ENTRY = ReferenceBackend()
