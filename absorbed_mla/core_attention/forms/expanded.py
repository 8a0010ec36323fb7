"""The expanded form: keys and values of every head are computed from the latent.

A key is [k_nope | k_rope]: the product with W_UK writes k_nope where fused attention wants it, and
the shared k_rope is written beside it. In backward one product gives the gradient of the latent
and the sum of k_rope's over the heads, accumulated in fp32, by a W_UK that an identity extends: ::

    [dk_nope | dk_rope] . [[W_UK, 0], [0, 1]] = [d_latent | d_k_rope]

Multiplying by one and adding zeros changes no bit but the sign of a zero. Forward does not use the
identity: with few queries over a long cache its R (C + nope + R) multiply-adds per head and token
would take a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from absorbed_mla.core_attention.forms.base import BlockGradients
from absorbed_mla.core_attention.types import NO_ROPE, AttentionInputs, AttentionOutput
from absorbed_mla.kernels.transposed_product import product, transposed_product
from absorbed_mla.rope import rotate_tail


class ExpandedForm:
    """Multi-head attention over keys and values that are expanded from the latent.

    They are expanded for a chunk of heads at a time, in forward and again in backward, so that
    their memory is bounded by ``chunk_size``. The query is [q_nope | q_rope] [S, B, N, nope + R].

    Args:
        chunk_size: Heads times key tokens expanded at a time, but at least one head; an eighth more
            where that makes fewer, equal chunks.
    """

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def query(self, q, w_uk, cos, sin):
        """The query with its rope part rotated in place."""
        heads = w_uk.shape[0]
        rotated = rotate_tail(q, cos, sin, heads)
        return (rotated.view(*q.shape[:2], heads, q.shape[-1] // heads),)

    def weights(self, w_uk, w_uv):
        """Both up-projections expand the latent."""
        return w_uk, w_uv

    def output(self, core_out, w_uv):
        """The output of the attention as it is: a sum of values."""
        return core_out

    def widths(self, dims):
        """See ``Form``."""
        return dims.qk_head_dim, dims.v_head_dim

    def forward(self, query, kv, weights, backend, rules):
        """See ``Form``; the output is [S, B, N, v]."""
        (q,), (w_uk, w_uv) = query, weights
        out: Tensor | None = None
        lse: Tensor | None = None
        for heads in self._head_chunks(w_uk, kv):
            own = _of_heads(w_uk, heads, dim=0), _of_heads(w_uv, heads, dim=0)
            inputs = _inputs(_of_heads(q, heads, dim=2), *expand(kv, *own))
            part = backend.forward(inputs, rules.for_heads(heads.start))
            # Free keys and values before memory for all heads is allocated.
            del inputs
            out, lse = (
                _write_heads(whole, share, heads, w_uk.shape[0], dim=2)
                for whole, share in zip((out, lse), part)
            )
        assert out is not None and lse is not None, "there is a head"
        return AttentionOutput(out, lse)

    def backward(self, grad, output, query, kv, weights, backend, rules):
        """See ``Form``."""
        (q,), (w_uk, w_uv) = query, weights
        dkv: Tensor | None = None
        dq: Tensor | None = None
        dw_uk: Tensor | None = None
        dw_uv: Tensor | None = None
        for heads in self._head_chunks(w_uk, kv):
            own = _of_heads(w_uk, heads, dim=0), _of_heads(w_uv, heads, dim=0)
            inputs = _inputs(_of_heads(q, heads, dim=2), *expand(kv, *own))
            part_grad, part_output = (
                type(group)(*(None if x is None else _of_heads(x, heads, dim=2) for x in group))
                for group in (grad, output)
            )
            found = backend.backward(part_grad, part_output, inputs, rules.for_heads(heads.start))
            # Free them before the products that need memory.
            del inputs
            part, *d_weights = expand_backward(kv, *own, found.k_content, found.value)
            dkv = part if dkv is None else dkv.add_(part)
            dq = _write_heads(dq, found.q_content, heads, w_uk.shape[0], dim=2)
            dw_uk, dw_uv = (
                _write_heads(whole, share, heads, w_uk.shape[0], dim=0)
                for whole, share in zip((dw_uk, dw_uv), d_weights)
            )
        assert dkv is not None and dq is not None, "there is a head"
        assert dw_uk is not None and dw_uv is not None
        return BlockGradients((dq,), dkv, (dw_uk, dw_uv))

    def _head_chunks(self, weight: Tensor, kv: Tensor) -> Iterator[slice]:
        heads, at_a_time = weight.shape[0], max(1, self.chunk_size // max(1, kv.shape[:2].numel()))
        # As few chunks as the bound allows, of about equal size. One chunk fewer, with up to an
        # eighth more memory, if all are equal then: 34k tokens and 128 heads make four chunks of 32
        # heads, which fill the multiprocessors of a GPU better than five of 26.
        chunks = -(-heads // at_a_time)
        fewer = -(-heads // max(at_a_time, at_a_time * 9 // 8))
        chunks = fewer if heads % fewer == 0 else chunks
        at_a_time = -(-heads // chunks)
        for first in range(0, heads, at_a_time):
            yield slice(first, min(first + at_a_time, heads))


def _inputs(q: Tensor, k: Tensor, v: Tensor) -> AttentionInputs:
    """Multi-head attention: q [S_q, B, N, D], k [S_k, B, N, D], v [S_k, B, N, V]."""
    return AttentionInputs(q, NO_ROPE, k, NO_ROPE, v)


def _of_heads(whole: Tensor, heads: slice, dim: int) -> Tensor:
    """The part of ``whole`` for a chunk of heads; itself, at no cost, where that is all of it."""
    count = heads.stop - heads.start
    return whole if count == whole.shape[dim] else whole.narrow(dim, heads.start, count)


def _write_heads(
    whole: Tensor | None, part: Tensor, heads: slice, num_heads: int, dim: int
) -> Tensor:
    """The tensor of all heads, made for the first chunk, with ``part`` written to its ``heads``.

    A chunk of all heads is returned as it is.
    """
    if part.shape[dim] == num_heads:
        return part
    if whole is None:
        whole = part.new_empty(*part.shape[:dim], num_heads, *part.shape[dim + 1 :])
    whole.narrow(dim, heads.start, part.shape[dim]).copy_(part)
    return whole


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
    tokens, batch, width = kv.shape
    rows = kv.flatten(0, 1)
    latent, k_rope = rows.split((c, width - c), dim=1)
    keys = kv.new_empty(tokens * batch, heads, nope + width - c)
    k_nope = keys.narrow(2, 0, nope).transpose(0, 1)
    torch.bmm(latent.expand(heads, -1, -1), w_uk.transpose(1, 2), out=k_nope)
    _broadcast_k_rope(k_rope, keys)
    values = latent.mm(w_uv.flatten(0, 1).t())
    return keys.view(tokens, batch, *keys.shape[1:]), values.view(tokens, batch, *w_uv.shape[:2])


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
    tokens = rows.shape[0]
    dk_rows, dv_rows = (x.to(kv.dtype).reshape(tokens, x.shape[2] * x.shape[3]) for x in (dk, dv))
    dkv = product(dk_rows, w_k.flatten(0, 1))
    dkv.narrow(1, 0, c).add_(product(dv_rows, w_uv.flatten(0, 1)))
    dw_k = transposed_product(dk_rows, rows).view(w_k.shape)
    dw_uv = transposed_product(dv_rows, rows.narrow(1, 0, c)).view(w_uv.shape)
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
    _, nope, c = w_uk.shape
    extended = F.pad(w_uk, (0, rope, 0, rope))
    extended[:, nope:, c:].diagonal(dim1=1, dim2=2).fill_(1)
    return extended
