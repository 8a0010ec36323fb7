"""Multi-head latent attention straight from its paper, in both forms, in fp32. Read this first.

DeepSeek-V2 (arXiv:2405.04434), section 2.1, causal; its equations are numbered in brackets. Shapes:
S tokens, B sequences, N heads, C = kv_lora_rank, head dims nope (no position), rope and v (value).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, einsum


@dataclass(frozen=True, kw_only=True)
class NaiveMLA:
    """One layer: its weights [out, in], fp32, and its constants."""

    w_dq: Tensor | None  # W^DQ [q_lora_rank, hidden]; None if q_lora_rank is
    w_uq: Tensor  # [W^UQ; W^QR] [N, nope + rope, q_lora_rank, or hidden without w_dq]
    w_dkv: Tensor  # [W^DKV; W^KR] [C + rope, hidden]
    w_uk: Tensor  # W^UK [N, nope, C]
    w_uv: Tensor  # W^UV [N, v, C]
    w_o: Tensor  # W^O [hidden, N, v]
    q_norm: Tensor | None = None  # gain of the compressed query's RMSNorm [q_lora_rank]
    kv_norm: Tensor | None = None  # gain of the latent's RMSNorm [C]
    eps: float = 1e-6  # of both norms
    theta: Tensor  # rotary frequencies, fp64 [rope / 2]: base ** (-2 i / rope), or YaRN's
    mscale: float = 1.0  # YaRN's temperature, by which query and key are multiplied


def naive_expanded(x: Tensor, w: NaiveMLA) -> Tensor:
    """Attention over keys and values of every head: [S, B, hidden] -> [S, B, hidden]."""
    q_nope, q_rope, latent, k_rope = _project(x, w)
    k_nope = einsum("sbc,nkc->sbnk", latent, w.w_uk)  # (10)
    value = einsum("sbc,nvc->sbnv", latent, w.w_uv)  # (11)
    query = torch.cat((q_nope, q_rope), -1)  # (16)
    key = torch.cat((k_nope, k_rope[:, :, None].expand(q_rope.shape)), -1)  # (17): one k_rope
    probs = _causal_softmax(einsum("sbnd,tbnd->bnst", query, key), w)
    return einsum("bnst,tbnv,hnv->sbh", probs, value, w.w_o)  # (18), (19)


def naive_absorbed(x: Tensor, w: NaiveMLA) -> Tensor:
    """The same function over latents, which all heads share: q . (W^UK c) = (W^UK^T q) . c."""
    q_nope, q_rope, latent, k_rope = _project(x, w)
    q_latent = einsum("sbnk,nkc->sbnc", q_nope, w.w_uk)  # (10) moved to the query
    scores = einsum("sbnc,tbc->bnst", q_latent, latent) + einsum("sbnr,tbr->bnst", q_rope, k_rope)
    o_latent = einsum("bnst,tbc->sbnc", _causal_softmax(scores, w), latent)  # (18)
    return einsum("sbnc,nvc,hnv->sbh", o_latent, w.w_uv, w.w_o)  # (11) moved behind, (19)


def _project(x: Tensor, w: NaiveMLA) -> tuple[Tensor, ...]:
    """q_nope [S, B, N, nope], q_rope [S, B, N, rope], latent [S, B, C], k_rope [S, B, rope]."""
    q_down = x if w.w_dq is None else _rms_norm(x @ w.w_dq.T, w.q_norm, w.eps)  # (12)
    query = einsum("sbi,ndi->sbnd", q_down, w.w_uq)  # (13), (14)
    q_nope, q_rope = query.tensor_split([w.w_uk.shape[1]], -1)
    latent, k_rope = (x @ w.w_dkv.T).tensor_split([w.w_uk.shape[2]], -1)  # (9), (15)
    return q_nope, _rope(q_rope, w), _rms_norm(latent, w.kv_norm, w.eps), _rope(k_rope, w)


def _rms_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:  # section 3.1.2
    return x if gain is None else gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _rope(x: Tensor, w: NaiveMLA) -> Tensor:
    """Turn the channel pairs (0, 1), (2, 3), ... of ``x`` [S, B, ...]: neighbours, not halves."""
    angles = torch.outer(torch.arange(len(x)).to(w.theta), w.theta)
    angles = angles.view(len(x), *[1] * (x.ndim - 2), len(w.theta))
    turn = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.unflatten(-1, (len(w.theta), 2)).contiguous())
    return torch.view_as_real(pairs * turn.to(pairs)).flatten(-2)


def _causal_softmax(scores: Tensor, w: NaiveMLA) -> Tensor:  # of (18), [B, N, S, S]
    scale = w.mscale**2 / math.sqrt(w.w_uq.shape[1])  # of nope + rope, in both forms
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return (scores * scale).masked_fill(future, -torch.inf).softmax(-1)
