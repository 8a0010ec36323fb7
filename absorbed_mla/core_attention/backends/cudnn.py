"""cuDNN's fused attention, through PyTorch's operators that return and take the LSE.

They know no packs: spans are cut into dense blocks, one call each, merged by their LSE in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from absorbed_mla.core_attention.backend import AttentionRequest, why_not_fused
from absorbed_mla.core_attention.backends.reference import (
    reference_backward,
    reference_forward,
    reference_one_pair,
    reference_one_pair_gradient,
)
from absorbed_mla.core_attention.largest_scores import record_by_search, why_not_search
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Spans
from absorbed_mla.core_attention.merge import merge
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient

_Tensors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class DenseBlock:
    """A full rectangle of (query, key) pairs, or a causal square.

    Attributes:
        queries: On the query axis.
        keys: On the key axis; as many as queries in a causal square.
        causal: Whether query i of the block sees its keys 0 to i only.
        first: Whether no earlier block has these queries.
    """

    queries: slice
    keys: slice
    causal: bool
    first: bool


def dense_blocks(spans: Spans) -> tuple[DenseBlock, ...]:
    """Blocks that hold every visible pair of the spans once, and no other pair."""
    return spans.tables.get("dense blocks", lambda: tuple(_cut_into_blocks(spans)))


def _cut_into_blocks(spans: Spans) -> Iterator[DenseBlock]:
    for span in spans:
        # If the first query sees all keys, so does every other.
        if span.causal_offset is None or span.causal_offset >= span.num_keys - 1:
            yield DenseBlock(span.queries, span.keys, causal=False, first=True)
            continue
        diagonal = span.key_start + span.causal_offset
        if span.causal_offset:
            # The keys before the last one that the first query sees.
            yield DenseBlock(
                span.queries, slice(span.key_start, diagonal), causal=False, first=True
            )
        size = min(span.num_queries, span.key_end - diagonal)
        below = span.query_start + size
        keys, first = slice(diagonal, diagonal + size), not span.causal_offset
        yield DenseBlock(slice(span.query_start, below), keys, causal=True, first=first)
        if below < span.query_end:
            yield DenseBlock(slice(below, span.query_end), keys, causal=False, first=first)


class CudnnBackend:
    """Multi-head attention in fp16 or bf16 on a GPU."""

    name = "cudnn"
    summary = "cuDNN through PyTorch; Hopper or newer, head widths up to 256, not deterministic"
    forms = ("expanded",)
    rates: Mapping[str, tuple[float, float]] = {"NVIDIA H200": (590.0, 460.0)}
    searches_max_logits = True

    def why_not(self, request: AttentionRequest) -> str | None:
        """See ``AttentionBackend``."""
        if request.deterministic:
            return (
                "its backward is not deterministic, which torch.use_deterministic_algorithms "
                "demands"
            )
        return why_not_fused(request) or (why_not_search() if request.max_logits else None)

    def forward(self, inputs: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        """See ``reference_forward``; several blocks are summed in fp32."""
        q, k, v = inputs.as_multi_head()
        output = self._forward(q, k, v, rules)
        record_by_search(q, k, output.lse, rules)
        return output

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, rules: ScoreRules) -> AttentionOutput:
        blocks = dense_blocks(rules.spans)
        if len(blocks) == 1 and blocks[0].queries == slice(0, len(q)):
            keys, causal = blocks[0].keys, blocks[0].causal
            return AttentionOutput(*self.dense_forward(q, k[keys], v[keys], causal, rules.scale))
        out = q.new_zeros(*q.shape[:3], v.shape[-1], dtype=torch.float32)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
        for block in blocks:
            queries, keys = block.queries, block.keys
            part = self.dense_forward(q[queries], k[keys], v[keys], block.causal, rules.scale)
            if not block.first:
                part = merge(out[queries], lse[queries], *part)
            out[queries], lse[queries] = part
        return AttentionOutput(out, lse)

    def backward(
        self,
        grad: OutputGradient,
        output: AttentionOutput,
        inputs: AttentionInputs,
        rules: ScoreRules,
    ) -> AttentionInputs:
        """See ``reference_backward``, which computes it where the LSE has a gradient."""
        if grad.lse is not None:
            return reference_backward(grad, output, inputs, rules)
        q, k, v = inputs.as_multi_head()
        blocks = dense_blocks(rules.spans)
        whole = (slice(0, len(q)), slice(0, len(k)))
        if len(blocks) == 1 and (blocks[0].queries, blocks[0].keys) == whole:
            found = self._block_gradient(blocks[0], grad.out, output, (q, k, v), rules.scale)
            return inputs.multi_head_gradient(*found)
        sums = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
        for block in blocks:
            found = self._block_gradient(block, grad.out, output, (q, k, v), rules.scale)
            for total, rows, part in zip(sums, (block.queries, block.keys, block.keys), found):
                total[rows] += part
        return inputs.multi_head_gradient(*sums)

    def _block_gradient(
        self, block: DenseBlock, grad_out: Tensor, output: AttentionOutput, qkv: _Tensors, scale
    ) -> _Tensors:
        q, k, v = qkv
        queries, keys = block.queries, block.keys
        rows = (grad_out[queries].contiguous(), q[queries], k[keys], v[keys])
        out = output.out[queries].contiguous()
        return self.dense_backward(*rows, out, output.lse[queries], block.causal, scale)

    def dense_forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of all queries to all keys, or causal with as many of both.

        Args:
            q: [S_q, B, N, D].
            k: [S_k, B, N, D].
            v: [S_k, B, N, V].
            causal: Whether query i sees keys 0 to i.
            scale: Multiplies the scores.

        Returns:
            Output [S_q, B, N, V] and LSE [S_q, B, N].
        """
        if len(q) == len(k) == 1:
            return reference_forward(*reference_one_pair(q, k, v, scale))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *_heads_first(q, k, v), None, True, 0.0, causal, False, scale=scale
        )
        return _no_view(out.permute(2, 0, 1, 3)), lse.reshape(out.shape[:3]).permute(2, 0, 1)

    def dense_backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> _Tensors:
        """Gradients of q, k and v; ``out`` and ``lse`` may be over more keys than ``k``."""
        if len(q) == len(k) == 1:
            output = AttentionOutput(out, lse)
            return reference_one_pair_gradient(grad_out, output, q, k, v, scale)
        # Without dropout the generator's state is not read.
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *_heads_first(grad_out, q, k, v, out),
            lse.permute(1, 2, 0).unsqueeze(-1).contiguous(),
            seed,
            seed,
            None,
            None,
            None,
            len(q),
            len(k),
            0.0,
            causal,
            scale=scale,
        )
        dq, dk, dv = (g.permute(2, 0, 1, 3) for g in grads)
        return dq, dk, dv


def _no_view(x: Tensor) -> Tensor:
    """``x`` as a tensor that is no view of another.

    TransformerEngine's CPU offloading copies the bases of views, and stops with an assertion at one
    that is not contiguous, as cuDNN's output.
    """
    return x.new_empty(0).set_(x)


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[S, B, N, D] to [B, N, S, D], as views."""
    return tuple(x.permute(1, 2, 0, 3) for x in tensors)


ENTRY = CudnnBackend()
