"""What fused attention computes, in float64, for stand-ins of packages that need a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def scores_of(q: Tensor, k: Tensor, scale: float, hidden_from: int | None) -> Tensor:
    """Scores [N, Q, K] of q [Q, N, D] and k [K, N or 1, D]; row i sees keys up to i + offset.

    Args:
        q: Queries.
        k: Keys.
        scale: Multiplies the scores.
        hidden_from: The offset, or None where every key is seen.
    """
    scores = torch.einsum("qnd,knd->nqk", q.double(), k.double().expand(-1, q.shape[1], -1))
    if hidden_from is not None:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(hidden.triu(1 + hidden_from), -torch.inf)
    return scores * scale


def attend(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output [Q, N, V] and LSE [N, Q]; v is [K, N or 1, V]."""
    lse = scores.logsumexp(-1)
    probs = (scores - lse[..., None]).exp()
    values = v.double().expand(-1, len(scores), -1)
    return torch.einsum("nqk,knv->qnv", probs, values), lse


def sequences(starts_q: Tensor, starts_k: Tensor, used_q: Tensor, used_k: Tensor):
    """Slices of the queries and of the keys of every sequence; they do not run into the next."""
    columns = [x.tolist() for x in (starts_q, starts_k, used_q, used_k)]
    for starts, used in (columns[::2], columns[1::2]):
        assert all(a + n <= b for a, b, n in zip(starts, starts[1:], used))
    return [(slice(a, a + n), slice(b, b + m)) for a, b, n, m in zip(*columns)]
