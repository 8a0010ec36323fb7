"""Latent attention as one step of autograd: one query, keys from anywhere, one softmax."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from absorbed_mla.core_attention.backend import AttentionBackend
from absorbed_mla.core_attention.forms import Form, Query
from absorbed_mla.core_attention.keys import KeyBlock, KeySource
from absorbed_mla.core_attention.merge import merge
from absorbed_mla.core_attention.operands import Attended, AttendedGradient
from absorbed_mla.core_attention.scores import ScoreRules


def attend(
    form: Form,
    backend: AttentionBackend,
    keys: KeySource,
    rules: Callable[[KeyBlock], ScoreRules],
    query: Query,
    kv: Tensor,
    weights: tuple[Tensor, ...],
) -> Attended:
    """Attend over all blocks of ``keys``.

    Kept for backward are the arguments and the result, and what ``keys`` keeps.

    Args:
        form: Absorbed or expanded.
        backend: Computes the attention.
        keys: Where keys come from.
        rules: The score rules on each block.
        query: The form's query.
        kv: What ``keys.start`` returned.
        weights: What the form applies inside the attention.

    Returns:
        Output [S, B, N, C or v] in the dtype of the query and LSE [S, B, N] in fp32 (fp64).
    """
    call = (form, backend, keys, rules)
    # Inside of the function autograd is always off.
    return Attended(*_Attend.apply(call, torch.is_grad_enabled(), *query, kv, *weights))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, keep: bool, q_content, q_rope, kv, *weights):
        form, backend, keys, rules = ctx.call = call
        query = Query(q_content, q_rope)
        parts = (
            form.forward(query, block.kv, weights, backend, rules(block))
            for block in keys.blocks(kv, keep)
        )
        out, lse = functools.reduce(lambda total, part: merge(*total, *part), parts)
        attended = Attended(out.to(q_content.dtype), lse)
        # The LSE's gradient is None unless somebody used the LSE: fused kernels take none.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*attended, q_content, q_rope, kv, *weights)
        return attended

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        out, lse, q_content, q_rope, kv, *weights = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        form, backend, keys, rules = ctx.call
        attended, query = Attended(out, lse), Query(q_content, q_rope)
        # One block leaves nothing to sum over blocks.
        sum_dtype = q_content.dtype if keys.num_blocks == 1 else lse.dtype
        query_grad = Query(*(torch.zeros_like(x, dtype=sum_dtype) for x in query))
        weight_grads = [torch.zeros_like(w, dtype=lse.dtype) for w in weights]

        def block_gradient(block: KeyBlock) -> Tensor:
            found = form.backward(
                AttendedGradient(grad_out, grad_lse),
                attended,
                query,
                block.kv,
                tuple(weights),
                backend,
                rules(block),
                query_grad,
            )
            for total, part in zip(weight_grads, found.weights):
                total.add_(part)
            return found.kv

        kv_grad = None
        if ctx.needs_input_grad[4]:
            kv_grad = keys.gradient(kv, block_gradient)
        else:
            for block in keys.blocks(kv, keep=False):
                block_gradient(block)
        query_grads = (x.to(q_content.dtype) for x in query_grad)
        cast_weight_grads = (g.to(w.dtype) for g, w in zip(weight_grads, weights))
        return None, None, *query_grads, kv_grad, *cast_weight_grads
