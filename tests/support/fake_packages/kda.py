"""flash-linear-attention as far as Megatron's Kimi Delta Attention calls it, in plain PyTorch.

The package needs Triton and a GPU.
"""

import itertools

import pytest
import torch
from torch import Tensor, nn


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x`` over the root of its sum of squares and ``eps``."""
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def chunk_kda(q, k, v, g, beta, A_log, dt_bias, *, safe_gate, lower_bound, cu_seqlens=None, **_):
    """The gated delta rule token by token, with a decay of each key channel.

    Args:
        q: [B, S, N, D], as k, v and g, the decay's projection.
        beta: [B, S, N], how much of the new value is written.
        A_log: [N].
        dt_bias: [N * D].
        safe_gate: Bound the logarithm of the decay by ``lower_bound``.
        cu_seqlens: Where sequences of a pack begin and end, or None.

    Returns:
        [B, S, N, D], and None for the last state.
    """
    rate, g = A_log.exp().view(-1, 1), g + dt_bias.view(g.shape[-2:])
    g = lower_bound * torch.sigmoid(rate * g) if safe_gate else -rate * torch.log1p(g.exp())
    starts = {0} if cu_seqlens is None else set(cu_seqlens.tolist())
    out = []
    for token in range(q.shape[1]):
        if token in starts:
            state = q.new_zeros(*k.shape[::2], k.shape[-1], v.shape[-1])
        state = state * g[:, token, :, :, None].exp()
        known = torch.einsum("bnk,bnkv->bnv", k[:, token], state)
        write = beta[:, token, :, None] * (v[:, token] - known)
        state = state + torch.einsum("bnk,bnv->bnkv", k[:, token], write)
        out.append(torch.einsum("bnk,bnkv->bnv", q[:, token], state) * q.shape[-1] ** -0.5)
    return torch.stack(out, 1), None


def causal_conv1d(x, weight, bias, activation, *, cu_seqlens=None, **_):
    """SiLU of each channel's convolution with its last tokens of the same sequence.

    Args:
        x: [B, S, C].
        weight: [C, W]; the last weight is the token's own.
        cu_seqlens: Where sequences of a pack begin and end, or None.
    """
    bounds = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    out = []
    for start, end in itertools.pairwise(bounds):
        padded = nn.functional.pad(x[:, start:end], (0, 0, weight.shape[-1] - 1, 0))
        out.append((padded.unfold(1, weight.shape[-1], 1) * weight).sum(-1))
    return nn.functional.silu(torch.cat(out, 1)), None


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Megatron's layers find these functions, as if the package were installed."""
    from megatron.core.ssm.gated_delta_net import common, kda

    for module, names in ((common, "HAVE_FLA l2norm"), (kda, "HAVE_FLA HAVE_FLA_KDA")):
        for name in names.split():
            monkeypatch.setattr(module, name, globals().get(name, True))
    monkeypatch.setattr(kda, "chunk_kda", chunk_kda)
    monkeypatch.setattr(kda, "causal_conv1d", causal_conv1d)
