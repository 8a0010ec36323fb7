"""Latent attention as one step of autograd: one query, keys from anywhere, one softmax."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from absorbed_mla.core_attention.backend import AttentionBackend
from absorbed_mla.core_attention.forms.forms import BlockGradients, Form, Query
from absorbed_mla.core_attention.key_source import KeyBlock, KeySource
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.merge import merge
from absorbed_mla.core_attention.types import AttentionOutput, OutputGradient
from absorbed_mla.first_order import first_order_only


# Compilers are kept out: fused kernels and tables of integers are nothing for them.
@torch.compiler.disable
def attend(
    form: Form,
    backend: AttentionBackend,
    keys: KeySource,
    rules: Callable[[KeyBlock], ScoreRules],
    query: Query,
    kv: Tensor,
    weights: tuple[Tensor, ...],
) -> AttentionOutput:
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
    if not torch.is_grad_enabled():
        return _attended(call, False, query, kv, weights)
    return AttentionOutput(*_Attend.apply(call, len(query), *query, kv, *weights))


def _attended(
    call, keep: bool, query: Query, kv: Tensor, weights: tuple[Tensor, ...]
) -> AttentionOutput:
    """Over all blocks; ``keep`` for a backward."""
    form, backend, keys, rules = call
    parts: Iterator[AttentionOutput] = (
        form.forward(query, block.kv, weights, backend, rules(block))
        for block in keys.blocks(kv, keep)
    )
    if keys.num_blocks > 1:
        parts = (_in_full_precision(part) for part in parts)
    out, lse = functools.reduce(_merge, parts)
    return AttentionOutput(out.to(query[0].dtype), lse)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, num_query: int, *tensors: Tensor):
        ctx.call, ctx.num_query = call, num_query
        attended = _attended(call, True, *_sort(num_query, tensors))
        # The LSE's gradient is None unless somebody used the LSE: some fused kernels take none.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*attended, *tensors)
        return attended

    @staticmethod
    @first_order_only
    def backward(ctx, grad_out, grad_lse):
        out, lse, *tensors = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        form, backend, keys, rules = ctx.call
        query, kv, weights = _sort(ctx.num_query, tensors)
        attended, grad = AttentionOutput(out, lse), OutputGradient(grad_out, grad_lse)
        found: BlockGradients | None = None

        def block_gradient(block: KeyBlock) -> Tensor:
            nonlocal found
            part = form.backward(grad, attended, query, block.kv, weights, backend, rules(block))
            found = part if found is None else _add(found, part, lse.dtype)
            return part.kv

        if ctx.needs_input_grad[2 + ctx.num_query]:
            kv_grad = keys.gradient(kv, block_gradient)
        else:
            kv_grad = None
            for block in keys.blocks(kv, keep=False):
                block_gradient(block)
        assert found is not None, "there is a block of keys"
        query_grads = (g.to(x.dtype) for g, x in zip(found.query, query))
        weight_grads = (g.to(w.dtype) for g, w in zip(found.weights, weights))
        return None, None, *query_grads, kv_grad, *weight_grads


def _sort(num_query: int, tensors) -> tuple[Query, Tensor, tuple[Tensor, ...]]:
    """Query, kv and weights."""
    return tuple(tensors[:num_query]), tensors[num_query], tuple(tensors[num_query + 1 :])


def _merge(total: AttentionOutput, part: AttentionOutput) -> AttentionOutput:
    return AttentionOutput(*merge(*total, *part))


def _in_full_precision(part: AttentionOutput) -> AttentionOutput:
    return AttentionOutput(part.out.to(part.lse.dtype), part.lse)


def _add(total: BlockGradients, part: BlockGradients, dtype: torch.dtype) -> BlockGradients:
    """The sum over blocks in ``dtype``, but for kv, which is the block's own."""
    query = tuple(a.to(dtype) + b for a, b in zip(total.query, part.query))
    return BlockGradients(query, part.kv, tuple(a + b for a, b in zip(total.weights, part.weights)))
