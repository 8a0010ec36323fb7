"""Keys and values of every head from the latent, and their gradients on the way back.

The shared k_rope becomes part of every head's key by the same product that makes k_nope: the
up-projection of keys is extended by an identity, ::

    [latent | k_rope] . [[W_UK^T, 0], [0, 1]] = [k_nope | k_rope]

so one GEMM writes keys as fused attention wants them, and in backward one GEMM gives the gradient
of the latent and the sum of k_rope's over the heads, accumulated in fp32. A factor of one and
zeros change no bit but the sign of a zero. It costs rope (C + nope + rope) more multiply-adds per
head and token, which is less time than writing the concatenation separately.
"""

from __future__ import annotations

import torch
from torch import Tensor


def extend_by_rope(w_uk: Tensor, rope: int) -> Tensor:
    """W_UK [N, nope, C] that hands k_rope through: [N, nope + rope, C + rope]."""
    heads, nope, c = w_uk.shape
    extended = w_uk.new_zeros(heads, nope + rope, c + rope)
    extended[:, :nope, :c] = w_uk
    extended[:, nope:, c:].diagonal(dim1=1, dim2=2).fill_(1)
    return extended


def expand(kv: Tensor, w_k: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values.

    Args:
        kv: [latent | k_rope], [S, B, C + rope].
        w_k: From :func:`extend_by_rope`.
        w_uv: [N, v, C].

    Returns:
        [S, B, N, nope + rope] and [S, B, N, v].
    """
    rows = kv.flatten(0, 1)
    keys = rows @ w_k.flatten(0, 1).t()
    values = rows[:, : w_uv.shape[-1]] @ w_uv.flatten(0, 1).t()
    return keys.view(*kv.shape[:2], *w_k.shape[:2]), values.view(*kv.shape[:2], *w_uv.shape[:2])


def expand_backward(
    kv: Tensor, w_k: Tensor, w_uv: Tensor, dk: Tensor, dv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of [latent | k_rope], W_UK and W_UV, in fp32 (fp64).

    Args:
        kv: As in :func:`expand`.
        w_k: As in :func:`expand`.
        w_uv: As in :func:`expand`.
        dk: [S, B, N, nope + rope].
        dv: [S, B, N, v].
    """
    c, rope = w_uv.shape[-1], kv.shape[-1] - w_uv.shape[-1]
    rows = kv.flatten(0, 1)
    dk_rows, dv_rows = (x.to(kv.dtype).reshape(len(rows), -1) for x in (dk, dv))
    dkv = _product(dk_rows, w_k.flatten(0, 1))
    dkv[:, :c] += _product(dv_rows, w_uv.flatten(0, 1))
    dw_k = _product(dk_rows.t(), rows).view(w_k.shape)
    dw_uv = _product(dv_rows.t(), rows[:, :c]).view(w_uv.shape)
    return dkv.view(kv.shape), dw_k[:, : w_k.shape[1] - rope, :c], dw_uv


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product whose sums stay in fp32 (fp64)."""
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(a, b, out_dtype=torch.float32)
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide) @ b.to(wide)
