"""The two products of the absorbed form: W_UK with the query, W_UV with the attention's output.

(q W_UK) . c = q . (W_UK c): multiplying the query instead of the latent c leaves the scores as they
are. ``W_UK`` and ``W_UV`` are views of the parameters, so both products train them. Source:
DeepSeek-V2, arXiv:2405.04434, section 2.1.2 and appendix C.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from absorbed_mla.batch_invariant import is_enabled, parts
from absorbed_mla.kernels.transposed_product import may_lose_last_row
from absorbed_mla.once_differentiable import once_differentiable


def absorb_query(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """Absorbed query ``q_nope . W_UK``, whose scores with the latent are those with the keys.

    Args:
        q_nope: [S, B, N, nope].
        w_uk: [N, nope, C].

    Returns:
        [S, B, N, C].
    """
    if _needs_own_product(q_nope):
        return _HeadProduct.apply(q_nope, w_uk)
    return _head_product("sbnd,ndc->sbnc", q_nope, w_uk)


def up_project_value(o_latent: Tensor, w_uv: Tensor) -> Tensor:
    """Values of the attended latent, ``o_latent . W_UV^T``: one product per query, not per key.

    Args:
        o_latent: [S, B, N, C].
        w_uv: [N, v, C].

    Returns:
        [S, B, N, v].
    """
    if _needs_own_product(o_latent):
        return _HeadProduct.apply(o_latent, w_uv.transpose(1, 2))
    return _head_product("sbnc,nvc->sbnv", o_latent, w_uv)


# torch.einsum leaves heads first, which the next layer of a decode step copies. Training does not
# come here, not even where gradients are off: what it computes again with gradients must lie in
# memory as it did.
def absorb_query_in_inference(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """:func:`absorb_query` without gradient, contiguous on a GPU."""
    if not q_nope.is_cuda or is_enabled(q_nope.device):
        return absorb_query(q_nope, w_uk)
    return _contiguous_product(q_nope, w_uk)


def up_project_value_in_inference(o_latent: Tensor, w_uv: Tensor) -> Tensor:
    """:func:`up_project_value` without gradient, contiguous on a GPU."""
    if not o_latent.is_cuda or is_enabled(o_latent.device):
        return up_project_value(o_latent, w_uv)
    return _contiguous_product(o_latent, w_uv.transpose(1, 2))


def _contiguous_product(x: Tensor, matrices: Tensor) -> Tensor:
    """``x`` [S, B, N, K] times ``matrices`` [N, K, C]: [S, B, N, C], contiguous; no gradient."""
    tokens, batch, heads, _ = x.shape
    result = x.new_empty(tokens * batch, heads, matrices.shape[2])
    torch.bmm(x.flatten(0, 1).transpose(0, 1), matrices, out=result.transpose(0, 1))
    return result.view(tokens, batch, heads, matrices.shape[2])


def _head_product(equation: str, x: Tensor, weight: Tensor) -> Tensor:
    """``x`` [S, B, N, ..] times a weight [N, ..], whose gradient misses no token."""
    if parts.fixed.count is not None:
        product = functools.partial(torch.einsum, equation)
        return torch.cat(parts.by_parts(product, (2, 0), x, weight), dim=2)
    tokens, batch = x.shape[:2]
    trains = x.is_cuda and tokens > 1 and torch.is_grad_enabled()
    if trains and may_lose_last_row(x, tokens * batch):
        return _last_row_apart(equation, x, weight)
    return torch.einsum(equation, x, weight)


def _last_row_apart(equation: str, x: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([torch.einsum(equation, part, weight) for part in (x[:-1], x[-1:])])


def _needs_own_product(x: Tensor) -> bool:
    """Whether parity mode is on, on a GPU: its operators there do not cover ``aten::bmm``."""
    return x.is_cuda and is_enabled(x.device)


class _HeadProduct(torch.autograd.Function):
    """``x`` [S, B, N, K] times ``weight`` [N, K, C]; the forward is batch-invariant."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        from absorbed_mla.kernels.invariant.product import head_product

        ctx.save_for_backward(x, weight)
        found = head_product(x.flatten(0, 1), weight)
        return found.view(*x.shape[:3], weight.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        if parts.fixed.count is not None:
            found = parts.by_parts(_head_gradients, (2, 2, 0), grad, x, weight)
            return tuple(torch.cat(some, dim) for some, dim in zip(zip(*found), (2, 0)))
        return _head_gradients(grad, x, weight)


def _head_gradients(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    dx = torch.einsum("sbnc,nkc->sbnk", grad, weight)
    rows = (slice(None),)
    if len(x) > 1 and may_lose_last_row(x, x.shape[0] * x.shape[1]):
        rows = slice(None, -1), slice(-1, None)
    return dx, sum(torch.einsum("sbnk,sbnc->nkc", x[part], grad[part]) for part in rows)
