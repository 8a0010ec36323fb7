"""The two executions of one equation: attend over the latent, or over keys and values.

A form turns a query and a block of latents into attention, forward and backward, without autograd:
keys may come in several blocks, which whoever calls a form visits one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from absorbed_mla.absorb import absorb_query, up_project_value
from absorbed_mla.core_attention.backend import AttentionBackend
from absorbed_mla.core_attention.forms.expansion import expand, expand_backward
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient
from absorbed_mla.dims import MLADims
from absorbed_mla.rope import apply_rope, rotate_tail

Query = tuple[Tensor, ...]
Weights = tuple[Tensor, ...]


class BlockGradients(NamedTuple):
    """Gradients from one block of keys: the query's in any dtype, the others' in the LSE's."""

    query: Query
    kv: Tensor
    weights: Weights


class Form(Protocol):
    """One execution of latent attention. Shapes: see ``absorbed_mla.dims``."""

    def query(self, q: Tensor, w_uk: Tensor, cos: Tensor, sin: Tensor) -> Query:
        """What the form multiplies with keys, from [q_nope | q_rope] [S, B, N * (nope + rope)].

        ``q`` is used up. ``cos`` and ``sin`` [S, rope / 2] are those of the tokens' positions.
        """
        ...

    def weights(self, w_uk: Tensor, w_uv: Tensor) -> Weights:
        """The up-projections that the attention itself applies."""
        ...

    def output(self, attended: Tensor, w_uv: Tensor) -> Tensor:
        """[S, B, N, v] from what was attended."""
        ...

    def widths(self, dims: MLADims) -> tuple[int, int, bool]:
        """Width of key and value, and whether they are the one latent head."""
        ...

    def forward(
        self,
        query: Query,
        kv: Tensor,
        weights: Weights,
        backend: AttentionBackend,
        rules: ScoreRules,
    ) -> AttentionOutput:
        """Attend over a block [latent | k_rope], [S_k, B, C + rope]."""
        ...

    def backward(
        self,
        grad: OutputGradient,
        attended: AttentionOutput,
        query: Query,
        kv: Tensor,
        weights: Weights,
        backend: AttentionBackend,
        rules: ScoreRules,
    ) -> BlockGradients:
        """Gradients from a block; ``attended`` may be over more keys than the block's."""
        ...


class AbsorbedForm:
    """Multi-query attention over the one latent head [latent | k_rope].

    Its query is the absorbed one [S, B, N, C], and q_rope [S, B, N, rope], rotated.
    """

    def query(self, q, w_uk, cos, sin):
        """See :class:`Form`."""
        heads, nope, _ = w_uk.shape
        q = q.unflatten(-1, (heads, -1))
        return absorb_query(q[..., :nope], w_uk), apply_rope(q[..., nope:], cos, sin)

    def weights(self, w_uk, w_uv):
        """None: both stand outside of the attention."""
        return ()

    def output(self, attended, w_uv):
        """Up-project the attended latent, once per query."""
        return up_project_value(attended, w_uv)

    def widths(self, dims):
        """See :class:`Form`."""
        return dims.kv_down_dim, dims.kv_lora_rank, True

    def forward(self, query, kv, weights, backend, rules):
        """Attend over the latent; [S, B, N, C]."""
        return backend.forward(_share(query, kv), rules)

    def backward(self, grad, attended, query, kv, weights, backend, rules):
        """See :class:`Form`."""
        found = backend.backward(grad, attended, _share(query, kv), rules)
        dkv = _rejoin(found.k_content.squeeze(2), found.k_rope)
        return BlockGradients((found.q_content, found.q_rope), dkv, ())


class ExpandedForm:
    """Multi-head attention over keys and values expanded from the latent.

    They exist for some heads at a time, in forward and again in backward, so that the memory they
    take grows neither with heads nor, up to ``chunk_size``, with tokens. Its query is
    [q_nope | q_rope] [S, B, N, nope + rope].

    Args:
        chunk_size: Heads times key tokens expanded at a time, but at least one head; an eighth more
            where that makes fewer, equal chunks.
    """

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def query(self, q, w_uk, cos, sin):
        """The query with its rope part rotated in place."""
        return (rotate_tail(q, cos, sin, len(w_uk)).unflatten(-1, (len(w_uk), -1)),)

    def weights(self, w_uk, w_uv):
        """Both up-projections expand the latent."""
        return w_uk, w_uv

    def output(self, attended, w_uv):
        """What was attended is the value already."""
        return attended

    def widths(self, dims):
        """See :class:`Form`."""
        return dims.qk_head_dim, dims.v_head_dim, False

    def forward(self, query, kv, weights, backend, rules):
        """Attend over the expanded heads; [S, B, N, v]."""
        (q,), (w_uk, w_uv) = query, weights
        out: Tensor | None = None
        lse: Tensor | None = None
        for heads in self._head_chunks(w_uk, kv):
            operands = AttentionInputs.multi_head(
                q[:, :, heads], *expand(kv, w_uk[heads], w_uv[heads])
            )
            part = backend.forward(operands, rules.for_heads(heads.start))
            # Keys and values go before the memory for all heads comes.
            del operands
            out, lse = (
                _put_heads(whole, share, heads, len(w_uk), dim=2)
                for whole, share in zip((out, lse), part)
            )
        assert out is not None and lse is not None, "there is a head"
        return AttentionOutput(out, lse)

    def backward(self, grad, attended, query, kv, weights, backend, rules):
        """See :class:`Form`."""
        (q,), (w_uk, w_uv) = query, weights
        dkv: Tensor | None = None
        dq: Tensor | None = None
        dw_uk: Tensor | None = None
        dw_uv: Tensor | None = None
        for heads in self._head_chunks(w_uk, kv):
            operands = AttentionInputs.multi_head(
                q[:, :, heads], *expand(kv, w_uk[heads], w_uv[heads])
            )
            part_grad, part_attended = (
                type(group)(*(None if x is None else x[:, :, heads] for x in group))
                for group in (grad, attended)
            )
            found = backend.backward(
                part_grad, part_attended, operands, rules.for_heads(heads.start)
            )
            # The operands go before the products that need memory come.
            del operands
            part, *d_weights = expand_backward(
                kv, w_uk[heads], w_uv[heads], found.k_content, found.value
            )
            dkv = part if dkv is None else dkv.add_(part)
            dq = _put_heads(dq, found.q_content, heads, len(w_uk), dim=2)
            dw_uk, dw_uv = (
                _put_heads(whole, share, heads, len(w_uk), dim=0)
                for whole, share in zip((dw_uk, dw_uv), d_weights)
            )
        assert dkv is not None and dq is not None, "there is a head"
        assert dw_uk is not None and dw_uv is not None
        return BlockGradients((dq,), dkv, (dw_uk, dw_uv))

    def _head_chunks(self, weight: Tensor, kv: Tensor) -> Iterator[slice]:
        heads, at_a_time = len(weight), max(1, self.chunk_size // max(1, kv.shape[:2].numel()))
        # As many chunks as that makes, of about equal size; with an eighth more memory if they are
        # equal then: 34k tokens and 128 heads are four chunks of 32, which fill the multiprocessors
        # of a GPU, not five of 26.
        chunks = -(-heads // at_a_time)
        fewer = -(-heads // max(at_a_time, at_a_time * 9 // 8))
        chunks = fewer if heads % fewer == 0 else chunks
        at_a_time = -(-heads // chunks)
        for first in range(0, heads, at_a_time):
            yield slice(first, min(first + at_a_time, heads))


def _put_heads(
    whole: Tensor | None, part: Tensor, heads: slice, num_heads: int, dim: int
) -> Tensor:
    """Write some heads among all, for which the first ones make memory; all at once are returned.

    Args:
        whole: All heads so far, or None.
        part: Heads ``heads``, which are dimension ``dim``.
        heads: Which ones.
        num_heads: Number of all.
        dim: The dimension of heads.
    """
    if part.shape[dim] == num_heads:
        return part
    if whole is None:
        whole = part.new_empty(*part.shape[:dim], num_heads, *part.shape[dim + 1 :])
    whole.narrow(dim, heads.start, part.shape[dim]).copy_(part)
    return whole


def _rejoin(latent: Tensor, k_rope: Tensor) -> Tensor:
    """[latent | k_rope], without a copy where they are the two parts of one tensor."""
    whole = latent._base
    if whole is not None and whole is k_rope._base and whole.ndim == latent.ndim:
        widths = latent.shape[-1], k_rope.shape[-1]
        if whole.shape == (*latent.shape[:-1], sum(widths)):
            return whole
    return torch.cat((latent, k_rope), dim=-1)


def _share(query: Query, kv: Tensor) -> AttentionInputs:
    """The absorbed query and the latent, which is key and value of all heads."""
    q_content, q_rope = query
    c = q_content.shape[-1]
    return AttentionInputs(q_content, q_rope, kv[..., None, :c], kv[..., c:], None)
