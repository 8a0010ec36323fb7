"""Keys and values of every head from the latent, and their gradients on the way back.

A key is [k_nope | k_rope]: the product with W_UK writes k_nope where fused attention wants it, and
the shared k_rope is written beside it. In backward one product gives the gradient of the latent
and the sum of k_rope's over the heads, accumulated in fp32, by a W_UK that an identity extends: ::

    [dk_nope | dk_rope] . [[W_UK, 0], [0, 1]] = [d_latent | d_k_rope]

A factor of one and zeros change no bit but the sign of a zero. Forward had that identity too, for
one launch less; with few queries over a long cache its rope (C + nope + rope) multiply-adds per
head and token were a tenth of the time.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expand(kv: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, without autograd: their gradients are :func:`expand_backward`'s.

    Args:
        kv: [latent | k_rope], [S, B, C + rope].
        w_uk: [N, nope, C].
        w_uv: [N, v, C].

    Returns:
        [S, B, N, nope + rope] and [S, B, N, v].
    """
    heads, nope, c = w_uk.shape
    rows = kv.flatten(0, 1)
    latent, k_rope = rows[:, :c], rows[:, c:]
    keys = kv.new_empty(len(rows), heads, nope + k_rope.shape[-1])
    k_nope = keys[..., :nope].transpose(0, 1)
    torch.bmm(latent.expand(heads, -1, -1), w_uk.transpose(1, 2), out=k_nope)
    _broadcast_k_rope(k_rope, keys)
    values = latent @ w_uv.flatten(0, 1).t()
    return keys.unflatten(0, kv.shape[:2]), values.view(*kv.shape[:2], *w_uv.shape[:2])


def expand_backward(
    kv: Tensor, w_uk: Tensor, w_uv: Tensor, dk: Tensor, dv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of [latent | k_rope], W_UK and W_UV, in fp32 (fp64).

    Args:
        kv: As in :func:`expand`.
        w_uk: As in :func:`expand`.
        w_uv: As in :func:`expand`.
        dk: [S, B, N, nope + rope].
        dv: [S, B, N, v].
    """
    (_, nope, c), rope = w_uk.shape, kv.shape[-1] - w_uk.shape[-1]
    w_k = _extend_by_rope(w_uk, rope)
    rows = kv.flatten(0, 1)
    dk_rows, dv_rows = (x.to(kv.dtype).flatten(0, 1).flatten(1) for x in (dk, dv))
    dkv = _product(dk_rows, w_k.flatten(0, 1))
    dkv[:, :c] += _product(dv_rows, w_uv.flatten(0, 1))
    dw_k = _product(dk_rows.t(), rows).view(w_k.shape)
    dw_uv = _product(dv_rows.t(), rows[:, :c]).view(w_uv.shape)
    return dkv.view(kv.shape), dw_k[:, :nope, :c], dw_uv


def _broadcast_k_rope(k_rope: Tensor, keys: Tensor) -> None:
    """Write k_rope [T, rope] to the last channels of every head of ``keys`` [T, N, nope + rope]."""
    rope = k_rope.shape[-1]
    if keys.is_cuda and rope:
        # Loaded where it runs: elsewhere the package does without Triton.
        from absorbed_mla.kernels.broadcast_k_rope import broadcast_k_rope

        broadcast_k_rope(k_rope, keys)
    else:
        keys[..., keys.shape[-1] - rope :] = k_rope[:, None]


def _extend_by_rope(w_uk: Tensor, rope: int) -> Tensor:
    """W_UK [N, nope, C] that hands k_rope through: [N, nope + rope, C + rope]."""
    heads, nope, c = w_uk.shape
    extended = w_uk.new_zeros(heads, nope + rope, c + rope)
    extended[:, :nope, :c] = w_uk
    extended[:, nope:, c:].diagonal(dim1=1, dim2=2).fill_(1)
    return extended


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product whose sums stay in fp32 (fp64)."""
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(a, b, out_dtype=torch.float32)
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide) @ b.to(wide)
