"""cuDNN's fused attention, through PyTorch's operators that return and take the LSE.

They know no packs, and align a causal mask at the top left only: spans are cut into dense blocks,
one call each. A query has one block or two, which are merged by their LSE, computed in fp32 and
rounded once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from absorbed_mla.core_attention.backend import AttentionRequest, why_not_fused
from absorbed_mla.core_attention.backends.reference import (
    reference_backward,
    reference_forward,
    reference_one_pair,
    reference_one_pair_gradient,
)
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Spans
from absorbed_mla.core_attention.max_logits_search import record_by_search, why_not_search
from absorbed_mla.core_attention.merge import merge_into
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
        last: Whether no later block has any of these queries. Those that have come right after.
    """

    queries: slice
    keys: slice
    causal: bool
    first: bool
    last: bool


def dense_blocks(spans: Spans) -> tuple[DenseBlock, ...]:
    """Blocks that hold every visible pair of the spans once, and no other pair.

    A query is in one of them or in two.
    """
    return spans.tables.get("dense blocks", lambda: tuple(_cut_into_blocks(spans)))


def _cut_into_blocks(spans: Spans) -> Iterator[DenseBlock]:
    for span in spans:
        # If the first query sees all keys, so does every other.
        if span.causal_offset is None or span.causal_offset >= span.num_keys - 1:
            yield DenseBlock(span.queries, span.keys, causal=False, first=True, last=True)
            continue
        diagonal = span.key_start + span.causal_offset
        if span.causal_offset:
            # The keys before the last one that the first query sees.
            before = slice(span.key_start, diagonal)
            yield DenseBlock(span.queries, before, causal=False, first=True, last=False)
        size = min(span.num_queries, span.key_end - diagonal)
        below = span.query_start + size
        keys, first = slice(diagonal, diagonal + size), not span.causal_offset
        queries = slice(span.query_start, below)
        yield DenseBlock(queries, keys, causal=True, first=first, last=True)
        if below < span.query_end:
            queries = slice(below, span.query_end)
            yield DenseBlock(queries, keys, causal=False, first=first, last=True)


def _by_queries(
    blocks: Iterable[DenseBlock], attend: Callable[[DenseBlock, int], tuple[Tensor, ...]]
) -> Iterator[tuple[slice, tuple[tuple[Tensor, ...], ...]]]:
    """Queries with what ``attend`` found for them, in the one or the two blocks that have them.

    It gets a block and its index.
    """
    wider: tuple[slice, tuple[Tensor, ...]] = (slice(0, 0), ())
    for index, block in enumerate(blocks):
        found = attend(block, index)
        if not block.last:
            wider = block.queries, found
        elif block.first:
            yield block.queries, (found,)
        else:
            start, rows = wider[0].start, block.queries
            same = slice(rows.start - start, rows.stop - start)
            yield rows, (tuple(x[same] for x in wider[1]), found)


@dataclass(frozen=True)
class _Fragment:
    """A run of a block's keys.

    Attributes:
        part: Among the keys of the block.
        total: On the key axis.
        first: Whether no earlier block has them.
    """

    part: slice
    total: slice
    first: bool


_Fragments = tuple[tuple[_Fragment, ...], ...]


def _key_rows(spans: Spans, num_keys: int) -> tuple[_Fragments, tuple[slice, ...]]:
    """How gradients of keys are added up without zeros to begin with.

    Returns:
        The keys of every block, split by whether an earlier block has them too; runs of keys that
        are in no block.
    """

    def make() -> tuple[_Fragments, tuple[slice, ...]]:
        blocks = dense_blocks(spans)
        bounds = {0, num_keys}.union(*((b.keys.start, b.keys.stop) for b in blocks))
        cuts = sorted(bounds)
        seen: set[int] = set()
        found = []
        for block in blocks:
            inside = cuts[bisect_left(cuts, block.keys.start) : bisect_right(cuts, block.keys.stop)]
            runs = _joined((a, b, a not in seen) for a, b in pairwise(inside))
            seen.update(inside[:-1])
            first = block.keys.start
            found.append(
                tuple(_Fragment(slice(a - first, b - first), slice(a, b), n) for a, b, n in runs)
            )
        gaps = _joined((a, b, True) for a, b in pairwise(cuts) if a not in seen)
        return tuple(found), tuple(slice(a, b) for a, b, _ in gaps)

    return spans.tables.get(("key rows", num_keys), make)


def _joined(runs: Iterable[tuple[int, int, bool]]) -> list[tuple[int, int, bool]]:
    """Runs (start, end, kind) in their order, adjacent ones of a kind as one."""
    found: list[tuple[int, int, bool]] = []
    for start, end, kind in runs:
        if found and found[-1][1:] == (start, kind):
            found[-1] = (found[-1][0], end, kind)
        else:
            found.append((start, end, kind))
    return found


def _add_rows(total: Tensor, part: Tensor, fragments: tuple[_Fragment, ...]) -> None:
    """Write or add a block's ``part`` to ``total``."""
    for fragment in fragments:
        rows = total[fragment.total]
        if fragment.first:
            rows.copy_(part[fragment.part])
        else:
            rows.add_(part[fragment.part])


class CudnnBackend:
    """Multi-head attention in fp16 or bf16 on a GPU."""

    name = "cudnn"
    summary = "cuDNN through PyTorch; Hopper or newer, head widths up to 256, not deterministic"
    forms = ("expanded",)
    rates: Mapping[str, tuple[float, float]] = {"NVIDIA H200": (590.0, 460.0)}
    searches_max_logits = True
    reads_device_spans = False
    adds_query_gradients = False
    windows = False
    sinks = False

    def why_not(self, request: AttentionRequest) -> str | None:
        """See ``AttentionBackend``."""
        if request.deterministic:
            return (
                "its backward is not deterministic, which torch.use_deterministic_algorithms "
                "demands"
            )
        return why_not_fused(request) or (why_not_search() if request.max_logits else None)

    def forward(self, inputs: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        """See ``reference_forward``; the output has the dtype of the inputs."""
        q, k, v = inputs.as_multi_head()
        output = self._forward(q, k, v, rules)
        record_by_search(q, k, output.lse, rules)
        return output

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, rules: ScoreRules) -> AttentionOutput:
        blocks = dense_blocks(rules.spans)
        if len(blocks) == 1 and blocks[0].queries == slice(0, len(q)):
            keys, causal = blocks[0].keys, blocks[0].causal
            return AttentionOutput(*self.dense_forward(q, k[keys], v[keys], causal, rules.scale))
        everywhere = rules.spans.cover(len(q))
        out = (q.new_empty if everywhere else q.new_zeros)(*q.shape[:3], v.shape[-1])
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        if not everywhere:
            lse.fill_(-torch.inf)

        def attend(block: DenseBlock, _: int) -> tuple[Tensor, ...]:
            rows = q[block.queries], k[block.keys], v[block.keys]
            return self.dense_forward(*rows, block.causal, rules.scale)

        for queries, parts in _by_queries(blocks, attend):
            if len(parts) == 1:
                out[queries], lse[queries] = parts[0]
            else:
                merge_into(out[queries], lse[queries], *parts)
        return AttentionOutput(out, lse)

    def backward(
        self,
        grad: OutputGradient,
        output: AttentionOutput,
        inputs: AttentionInputs,
        rules: ScoreRules,
    ) -> AttentionInputs:
        """See ``reference_backward``, which computes it where the LSE has a gradient.

        Gradients have the dtype of the inputs. Under context parallelism a query has two blocks at
        most, and a key two: their sum is rounded once.
        """
        if grad.lse is not None:
            return reference_backward(grad, output, inputs, rules)
        qkv = q, k, v = inputs.as_multi_head()
        blocks = dense_blocks(rules.spans)
        # Once for all blocks, where they are of some of the heads.
        output = AttentionOutput(output.out.contiguous(), output.lse)
        grad_out = grad.out.contiguous()
        whole = (slice(0, len(q)), slice(0, len(k)))
        if len(blocks) == 1 and (blocks[0].queries, blocks[0].keys) == whole:
            found = self._block_gradient(blocks[0], grad_out, output, qkv, rules.scale)
            return inputs.multi_head_gradient(*found)
        dq = (torch.empty_like if rules.spans.cover(len(q)) else torch.zeros_like)(
            q, memory_format=torch.contiguous_format
        )
        dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))

        written, unseen = _key_rows(rules.spans, len(k))

        def attend(block: DenseBlock, index: int) -> tuple[Tensor, ...]:
            of_query, *of_keys = self._block_gradient(block, grad_out, output, qkv, rules.scale)
            for total, part in zip((dk, dv), of_keys):
                _add_rows(total, part, written[index])
            return (of_query,)

        for queries, parts in _by_queries(blocks, attend):
            if len(parts) == 1:
                dq[queries] = parts[0][0]
            else:
                torch.add(parts[0][0], parts[1][0], out=dq[queries])
        for rows in unseen:
            dk[rows], dv[rows] = 0, 0
        return inputs.multi_head_gradient(dq, dk, dv)

    def _block_gradient(
        self, block: DenseBlock, grad_out: Tensor, output: AttentionOutput, qkv: _Tensors, scale
    ) -> _Tensors:
        q, k, v = qkv
        queries, keys = block.queries, block.keys
        rows = (grad_out[queries], q[queries], k[keys], v[keys], output.out[queries])
        return self.dense_backward(*rows, output.lse[queries], block.causal, scale)

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
        # The generator's state, which is not read without dropout.
        seed = torch.empty((), dtype=torch.int64, device=q.device)
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
