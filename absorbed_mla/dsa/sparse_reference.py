"""Attention over chosen keys in plain PyTorch: what every sparse kernel is tested against.

The absorbed form: all heads share one key, [latent | k_rope], and one value, the latent. Keys are
gathered for one chunk of queries at a time, in forward and backward; backward recomputes the
probabilities from the log-sum-exp. Arithmetic is fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient
from absorbed_mla.dsa.key_subset import KeySubset, chosen_keys, head_groups

SparseForward = Callable[[AttentionInputs, Tensor, float], AttentionOutput]


def latent_inputs(q_content: Tensor, q_rope: Tensor, kv: Tensor) -> AttentionInputs:
    """Inputs of the absorbed form, whose value is the latent.

    Args:
        q_content: Absorbed query, [S_q, B, N, C].
        q_rope: Rotated query, [S_q, B, N, R].
        kv: [latent | k_rope], [S_k, B, C + R].
    """
    width = q_content.shape[-1]
    return AttentionInputs(q_content, q_rope, kv[..., None, :width], kv[..., width:], None)


def sparse_forward(inputs: AttentionInputs, chosen: Tensor, scale: float) -> AttentionOutput:
    """Attention of every query over the keys chosen for it, without autograd.

    Args:
        inputs: In the absorbed form, from :func:`latent_inputs`.
        chosen: A selection, int32 [S_q, B, topk]: indices of keys, -1 for none.
        scale: Multiplies the scores.

    Returns:
        Output [S_q, B, N, C] and LSE [S_q, B, N] in fp32 (fp64); 0 and -inf where a query has no
        key.
    """
    q_content, q_rope, k_content, k_rope, value = inputs
    assert value is None and k_content.shape[2] == 1, "sparse attention is over the latent"
    query, compute = torch.cat((q_content, q_rope), dim=-1), compute_dtype(q_content)
    width = q_content.shape[-1]
    out = query.new_zeros(*query.shape[:3], width, dtype=compute)
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=compute)
    for subset in chosen_keys(chosen, query.shape[-1]):
        rows = subset.queries
        # Not of all keys joined: they may be a whole cache.
        parts = subset.take(k_content.squeeze(2)), subset.take(k_rope)
        taken = torch.cat(parts, dim=-1).to(compute)
        for heads in head_groups(query.shape[2], subset.heads):
            scores = masked_scores(query[rows, :, heads].to(compute), taken, subset, scale)
            found = torch.logsumexp(scores, dim=-1)
            out[rows, :, heads] = subset.sum_of_keys(
                probabilities(scores, found), taken[..., :width]
            )
            lse[rows, :, heads] = found.permute(2, 0, 1)
    return AttentionOutput(out, lse)


def sparse_backward(
    grad: OutputGradient,
    output: AttentionOutput,
    inputs: AttentionInputs,
    chosen: Tensor,
    scale: float,
) -> AttentionInputs:
    """Gradients of the inputs of :func:`sparse_forward`, in fp32 (fp64).

    The keys may be a part of those that ``output`` is the attention over, as in the dense
    reference: ``chosen`` then has -1 for keys that are elsewhere.
    """
    query, kv, compute = _joined(inputs)
    width = inputs.q_content.shape[-1]
    dquery = torch.zeros_like(query, dtype=compute)
    dkv = torch.zeros_like(kv, dtype=compute)
    # delta is the row sum of probs * dprobs; an LSE gradient enters the same row term.
    delta = (output.out.to(compute) * grad.out.to(compute)).sum(-1)
    if grad.lse is not None:
        delta = delta - grad.lse
    for subset in chosen_keys(chosen, kv.shape[-1]):
        rows = subset.queries
        taken = subset.take(kv).to(compute)
        for heads in head_groups(query.shape[2], subset.heads):
            q, do = query[rows, :, heads].to(compute), grad.out[rows, :, heads].to(compute)
            scores = masked_scores(q, taken, subset, scale)
            probs = probabilities(scores, output.lse[rows, :, heads].permute(1, 2, 0))
            dprobs = subset.products(do, taken[..., :width])
            dscores = probs * (dprobs - delta[rows, :, heads].permute(1, 2, 0)[..., None]) * scale
            dquery[rows, :, heads] = subset.sum_of_keys(dscores, taken)
            subset.add_to_keys(dkv, dscores, q)
            subset.add_to_keys(dkv[..., :width], probs, do)
    dcontent, drope = dquery.split([width, dquery.shape[-1] - width], dim=-1)
    return AttentionInputs(dcontent, drope, dkv[..., None, :width], dkv[..., width:], None)


def masked_scores(query: Tensor, taken: Tensor, subset: KeySubset, scale: float) -> Tensor:
    """Scaled scores [B, H, Q, P] of ``query`` [Q, B, H, C + R]; -inf where there is no key."""
    scores = subset.products(query, taken) * scale
    return scores.masked_fill(~subset.seen.expand(scores.shape[0], -1, -1)[:, None], -torch.inf)


def probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), [B, H, Q, P]; zeros for a query that has no key."""
    # -inf - -inf would be NaN.
    return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])


def _joined(inputs: AttentionInputs) -> tuple[Tensor, Tensor, torch.dtype]:
    """Whole queries [S_q, B, N, C + R] and keys [S_k, B, C + R], and the dtype to compute in."""
    q_content, q_rope, k_content, k_rope, value = inputs
    assert value is None and k_content.shape[2] == 1, "sparse attention is over the latent"
    query = torch.cat((q_content, q_rope), dim=-1)
    kv = torch.cat((k_content.squeeze(2), k_rope), dim=-1)
    return query, kv, compute_dtype(query)


def compute_dtype(query: Tensor) -> torch.dtype:
    """What the reference computes in: fp32, or fp64."""
    return torch.promote_types(query.dtype, torch.float32)
