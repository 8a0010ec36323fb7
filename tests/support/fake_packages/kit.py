"""Attention and its gradient in float64, as fused kernels compute them.

Shapes: q [..., Q, N, D], k [..., K, N or 1, D], v [..., K, N or 1, V]; the LSE is [..., N, Q].
``causal_offset`` lets query i see keys up to i + offset; None lets it see all.
"""

import sys
from types import ModuleType

import torch
from torch import Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal_offset: int | None
) -> tuple[Tensor, Tensor]:
    """Output [..., Q, N, V] and LSE."""
    scores = _scores(q, k, scale, causal_offset)
    lse = scores.logsumexp(-1)
    probs = (scores - lse[..., None]).exp()
    return torch.einsum("...nqk,...knv->...qnv", probs, _every_head(v, q)), lse


def largest(q: Tensor, k: Tensor, scale: float, causal_offset: int | None) -> Tensor:
    """The largest score of every query, [..., N, Q]."""
    return _scores(q, k, scale, causal_offset).amax(-1)


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    scale: float,
    causal_offset: int | None,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; ``out`` and ``lse`` may be over more keys than ``k``."""
    q, k, v, out, grad = (x.double() for x in (q, k, v, out, grad))
    probs = (_scores(q, k, scale, causal_offset) - lse.double()[..., None]).exp()
    dprobs = torch.einsum("...qnv,...knv->...nqk", grad, v)
    delta = torch.einsum("...qnv,...qnv->...nq", grad, out)
    if grad_lse is not None:
        delta = delta - grad_lse
    ds = probs * (dprobs - delta[..., None]) * scale
    dq = torch.einsum("...nqk,...knd->...qnd", ds, k)
    dk = torch.einsum("...nqk,...qnd->...knd", ds, q)
    return dq, dk, torch.einsum("...nqk,...qnv->...knv", probs, grad)


def _scores(q: Tensor, k: Tensor, scale: float, causal_offset: int | None) -> Tensor:
    scores = torch.einsum("...qnd,...knd->...nqk", q.double(), _every_head(k, q)) * scale
    if causal_offset is not None:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(hidden.triu(1 + causal_offset), -torch.inf)
    return scores


def _every_head(x: Tensor, q: Tensor) -> Tensor:
    return x.double().expand(*x.shape[:-2], q.shape[-2], -1)


def sequences(
    starts_q: Tensor, starts_k: Tensor, used_q: Tensor, used_k: Tensor
) -> list[tuple[slice, slice]]:
    """Slices of the queries and of the keys of every sequence; none may run into the next."""
    columns = [x.tolist() for x in (starts_q, starts_k, used_q, used_k)]
    for starts, used in (columns[::2], columns[1::2]):
        assert all(a + n <= b for a, b, n in zip(starts, starts[1:], used))
    return [(slice(a, a + n), slice(b, b + m)) for a, b, n, m in zip(*columns)]


def install(monkeypatch, name: str, module: object) -> None:
    """Have ``import name`` give ``module``, whether or not there is such a package."""
    parents = name.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        parent = ".".join(parents[:depth])
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)
