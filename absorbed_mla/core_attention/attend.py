"""The autograd function of latent attention, over keys from any source."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from absorbed_mla.batch_invariant import collectives, parts
from absorbed_mla.batch_invariant.tree import tree_sum
from absorbed_mla.core_attention.backend import AttentionBackend
from absorbed_mla.core_attention.forms.base import BlockGradients, Form, Query
from absorbed_mla.core_attention.key_source import KeyBlock, KeySource
from absorbed_mla.core_attention.masks.scores import ScoreRules, Sink
from absorbed_mla.core_attention.merge import merge
from absorbed_mla.core_attention.sink import add_sink, sink_gradient
from absorbed_mla.core_attention.types import AttentionOutput, OutputGradient
from absorbed_mla.once_differentiable import once_differentiable


@dataclass(frozen=True)
class AttentionPlan:
    """Everything about one attention call that is no activation or weight.

    Attributes:
        form: Absorbed or expanded.
        backend: Computes the attention.
        keys: Where keys come from; a ``TrainableKeySource`` where there is a backward.
        rules: The score rules, without the spans, which differ between blocks of keys.
    """

    form: Form
    backend: AttentionBackend
    keys: KeySource
    rules: ScoreRules

    def rules_on(self, block: KeyBlock) -> ScoreRules:
        """The score rules on one block of keys."""
        return self.rules.on_keys(block.spans, block.tokens)

    def beside(self, sink: Tensor | None) -> AttentionPlan:
        """The plan with the sink [N] in the score rules, if the backend sees all keys at once."""
        if sink is None or self.keys.num_blocks > 1 or not self.backend.sinks:
            return self
        return replace(self, rules=replace(self.rules, sink=Sink(sink)))


# torch.compile cannot trace tables made on the host, nor external kernels.
@torch.compiler.disable
def attend(
    plan: AttentionPlan,
    query: Query,
    kv: Tensor,
    weights: tuple[Tensor, ...],
    sink: Tensor | None = None,
) -> AttentionOutput:
    """Attention over all blocks of ``plan.keys``.

    Saved for backward: the arguments, the result, and what the key source keeps.

    Args:
        plan: Form, backend, keys and rules.
        query: The form's query.
        kv: What ``plan.keys.start`` returned.
        weights: The up-projections that the form applies inside of the attention.
        sink: Logit of each head beside its scores (``sink.py``), [N], or None.

    Returns:
        Output [S, B, N, C or v] in the dtype of the query and LSE [S, B, N] in fp32 (fp64), that
        of the sink included.
    """
    if not torch.is_grad_enabled():
        return _forward(plan, sink, query, kv, weights, keep=False)
    return AttentionOutput(*_Attention.apply(plan, len(query), sink, *query, kv, *weights))


def _forward(
    plan: AttentionPlan,
    sink: Tensor | None,
    query: Query,
    kv: Tensor,
    weights: tuple[Tensor, ...],
    keep: bool,
) -> AttentionOutput:
    """Attention over all blocks, merged by their LSE; ``keep`` where a backward follows."""
    plan = plan.beside(sink)
    outputs = (
        plan.form.forward(query, block.kv, weights, plan.backend, plan.rules_on(block))
        for block in plan.keys.blocks(kv, keep)
    )
    out, lse = next(outputs)
    if plan.keys.num_blocks > 1:
        # Partial outputs are summed in the dtype of the LSE.
        out = out.to(lse.dtype)
    out, lse = functools.reduce(lambda total, part: merge(*total, *part), outputs, (out, lse))
    if sink is not None and plan.rules.sink is None:
        out, lse = add_sink(out, lse, sink)
    return AttentionOutput(out.to(query[0].dtype), lse)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: AttentionPlan, num_query: int, sink: Tensor | None, *tensors: Tensor):
        ctx.plan, ctx.num_query = plan, num_query
        output = _forward(plan, sink, *_split(num_query, tensors), keep=True)
        # The gradient of an unused LSE stays None: some fused kernels take none.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, sink, *tensors)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_lse):
        out, lse, sink, *tensors = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        plan: AttentionPlan = ctx.plan.beside(sink if ctx.needs_input_grad[2] else None)
        query, kv, weights = _split(ctx.num_query, tensors)
        output, grad = AttentionOutput(out, lse), OutputGradient(grad_out, grad_lse)
        total: BlockGradients | None = None

        def block_gradient(block: KeyBlock) -> Tensor:
            nonlocal total
            rules = plan.rules_on(block)
            part = _block_gradients(plan, grad, output, query, block.kv, weights, rules)
            if total is None:
                total = part
                if plan.keys.num_blocks > 1:
                    # What all blocks add to; that of kv belongs to one block.
                    wide = tuple(x.to(lse.dtype) for x in part.query)
                    total = BlockGradients(wide, part.kv, part.weights)
            else:
                for x, y in zip((*total.query, *total.weights), (*part.query, *part.weights)):
                    x.add_(y)
            return part.kv

        if ctx.needs_input_grad[3 + ctx.num_query]:
            kv_grad = plan.keys.gradient(kv, block_gradient)  # type: ignore[attr-defined]
        else:
            kv_grad = None
            for block in plan.keys.blocks(kv, keep=False):
                block_gradient(block)
        assert total is not None, "there is a block of keys"
        query_grads = (g.to(x.dtype) for g, x in zip(total.query, query))
        weight_grads = (g.to(w.dtype) for g, w in zip(total.weights, weights))
        sink_grad = None
        if ctx.needs_input_grad[2]:
            of_heads = plan.rules.sink.gradients if plan.rules.sink else ()
            sink_grad = sink_gradient(grad, output, sink, of_heads)
        return None, None, sink_grad, *query_grads, kv_grad, *weight_grads


def _block_gradients(
    plan: AttentionPlan,
    grad: OutputGradient,
    output: AttentionOutput,
    query: Query,
    kv: Tensor,
    weights: tuple[Tensor, ...],
    rules: ScoreRules,
) -> BlockGradients:
    """Gradients of a block of keys; with fixed parts that of kv is summed over all ranks' heads."""
    if parts.fixed.count is None:
        return plan.form.backward(grad, output, query, kv, weights, plan.backend, rules)
    # By heads, [S, B, N, ...] and weights [N, ...].
    by_heads = (grad.out, *output, *query, *([] if grad.lse is None else [grad.lse]))

    def of_heads(*tensors: Tensor) -> BlockGradients:
        out_grad, out, lse, *more = tensors[: len(by_heads)]
        some = OutputGradient(out_grad, more[len(query)] if grad.lse is not None else None)
        some_output, some_query = AttentionOutput(out, lse), tuple(more[: len(query)])
        some_weights = tensors[len(by_heads) :]
        return plan.form.backward(
            some, some_output, some_query, kv, some_weights, plan.backend, rules
        )

    dims = [2] * len(by_heads) + [0] * len(weights)
    found = parts.by_parts(of_heads, dims, *by_heads, *weights)
    dkv = tree_sum([one.kv.to(parts.wide(kv.dtype)) for one in found])
    return BlockGradients(
        tuple(torch.cat(some, dim=2) for some in zip(*(one.query for one in found))),
        collectives.reduce_by_tree(dkv, parts.tensor_parallel_group()),
        tuple(torch.cat(some) for some in zip(*(one.weights for one in found))),
    )


def _split(num_query: int, tensors) -> tuple[Query, Tensor, tuple[Tensor, ...]]:
    """Query, kv and weights, which autograd takes in one list."""
    return tuple(tensors[:num_query]), tensors[num_query], tuple(tensors[num_query + 1 :])
