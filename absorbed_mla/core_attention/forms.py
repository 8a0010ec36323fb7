"""The two executions of one equation: attend over the latent, or over keys and values.

A form turns a query and a block of latents into attention, forward and backward, without autograd:
keys may come in several blocks, which whoever calls a form visits one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from absorbed_mla.absorb import absorb_query, expand_latent, up_project_value
from absorbed_mla.core_attention.backend import AttentionBackend
from absorbed_mla.core_attention.merge import merge
from absorbed_mla.core_attention.operands import Attended, AttendedGradient, Operands
from absorbed_mla.core_attention.scores import ScoreRules
from absorbed_mla.dims import MLADims

Weights = tuple[Tensor, ...]


class Query(NamedTuple):
    """The query of a form: [S, B, N, C or nope] and, rotated, [S, B, N, rope]."""

    content: Tensor
    rope: Tensor


class BlockGradients(NamedTuple):
    """Gradients from one block of keys, in the dtype of the LSE."""

    kv: Tensor
    weights: Weights


class Form(Protocol):
    """One execution of latent attention. Shapes: see ``absorbed_mla.dims``."""

    def query(self, q_nope: Tensor, w_uk: Tensor) -> Tensor:
        """What the form multiplies with keys, from q_nope [S, B, N, nope]."""
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
        self, query: Query, kv: Tensor, weights: Weights, backend: AttentionBackend, rules
    ) -> Attended:
        """Attend over a block [latent | k_rope], [S_k, B, C + rope]."""
        ...

    def backward(
        self,
        grad: AttendedGradient,
        attended: Attended,
        query: Query,
        kv: Tensor,
        weights: Weights,
        backend: AttentionBackend,
        rules: ScoreRules,
        query_grad: Query,
    ) -> BlockGradients:
        """Gradients from a block; the query's are added to ``query_grad``.

        ``attended`` may be over more keys than the block's.
        """
        ...


class AbsorbedForm:
    """Multi-query attention over the one latent head [latent | k_rope]."""

    def query(self, q_nope, w_uk):
        """The absorbed query [S, B, N, C]."""
        return absorb_query(q_nope, w_uk)

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

    def backward(self, grad, attended, query, kv, weights, backend, rules, query_grad):
        """See :class:`Form`."""
        found = backend.backward(grad, attended, _share(query, kv), rules)
        query_grad.content.add_(found.q_content)
        query_grad.rope.add_(found.q_rope)
        return BlockGradients(torch.cat((found.k_content.squeeze(2), found.k_rope), dim=-1), ())


class ExpandedForm:
    """Multi-head attention over keys and values expanded from the latent.

    They exist for some heads and some tokens at a time, in forward and again in backward, whatever
    the length of the sequence.

    Args:
        head_chunk: Heads expanded at a time.
        token_chunk: Key tokens expanded at a time.
    """

    def __init__(self, head_chunk: int, token_chunk: int) -> None:
        self.head_chunk = head_chunk
        self.token_chunk = token_chunk

    def query(self, q_nope, w_uk):
        """q_nope as it is."""
        return q_nope

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
        w_uk, w_uv = weights
        lse_dtype = torch.promote_types(kv.dtype, torch.float32)
        out = kv.new_zeros(*query.content.shape[:3], w_uv.shape[1], dtype=lse_dtype)
        lse = kv.new_full(query.content.shape[:3], -torch.inf, dtype=lse_dtype)
        for heads in self._head_chunks(w_uk):
            part_query = Query(*(x[:, :, heads] for x in query))
            merged = None
            for keys, windowed in self._windows(rules.for_heads(heads.start), len(kv)):
                operands = _expand(part_query, kv[keys], w_uk[heads], w_uv[heads])
                part = backend.forward(operands, windowed)
                merged = part if merged is None else merge(*merged, *part)
            if merged is not None:
                out[:, :, heads], lse[:, :, heads] = merged
        return Attended(out, lse)

    def backward(self, grad, attended, query, kv, weights, backend, rules, query_grad):
        """See :class:`Form`."""
        w_uk, w_uv = weights
        dkv, *weight_grads = (
            torch.zeros_like(x, dtype=attended.lse.dtype) for x in (kv, w_uk, w_uv)
        )
        for heads in self._head_chunks(w_uk):
            part_grad, part_attended, part_query = (
                type(group)(*(None if x is None else x[:, :, heads] for x in group))
                for group in (grad, attended, query)
            )
            for keys, windowed in self._windows(rules.for_heads(heads.start), len(kv)):
                operands = _expand(part_query, kv[keys], w_uk[heads], w_uv[heads])
                found = backend.backward(part_grad, part_attended, operands, windowed)
                query_grad.content[:, :, heads] += found.q_content
                query_grad.rope[:, :, heads] += found.q_rope
                latent = kv[keys][..., : w_uk.shape[-1]]
                d_latent, d_weights = _expand_backward(
                    latent, (w_uk[heads], w_uv[heads]), (found.k_content, found.value)
                )
                dkv[keys] += torch.cat((d_latent, found.k_rope), dim=-1)
                for total, part in zip(weight_grads, d_weights):
                    total[heads] += part
        return BlockGradients(dkv, tuple(weight_grads))

    def _head_chunks(self, weight: Tensor) -> Iterator[slice]:
        for first in range(0, len(weight), self.head_chunk):
            yield slice(first, min(first + self.head_chunk, len(weight)))

    def _windows(self, rules: ScoreRules, tokens: int) -> Iterator[tuple[slice, ScoreRules]]:
        """Runs of keys that some query sees, and the rules on each."""
        for first in range(0, tokens, self.token_chunk):
            last = min(first + self.token_chunk, tokens)
            windowed = rules.window(first, last)
            if windowed.spans:
                yield slice(first, last), windowed


def _split(kv: Tensor, kv_lora_rank: int) -> tuple[Tensor, Tensor]:
    """Latent and k_rope, views of ``kv``."""
    return kv[..., :kv_lora_rank], kv[..., kv_lora_rank:]


def _share(query: Query, kv: Tensor) -> Operands:
    """The absorbed query and the latent, which is key and value of all heads."""
    latent, k_rope = _split(kv, query.content.shape[-1])
    return Operands(query.content, query.rope, latent.unsqueeze(2), k_rope, None)


def _expand(query: Query, kv: Tensor, w_uk: Tensor, w_uv: Tensor) -> Operands:
    """The query, k_nope [S, B, N, nope], k_rope [S, B, rope] and the value [S, B, N, v]."""
    latent, k_rope = _split(kv, w_uk.shape[-1])
    k_nope, value = expand_latent(latent, w_uk), expand_latent(latent, w_uv)
    return Operands(query.content, query.rope, k_nope, k_rope, value)


def _expand_backward(
    latent: Tensor, weights: Weights, grads: tuple[Tensor, Tensor]
) -> tuple[Tensor, Weights]:
    """Gradients of the latent [S, B, C] and of both weights, in the dtype of ``grads``.

    Products are of the operands' precision, as those of a linear layer; sums are not.
    """
    d_latent, d_weights = torch.zeros_like(latent, dtype=grads[0].dtype), []
    for weight, wide in zip(weights, grads):
        grad = wide.to(latent.dtype)
        d_latent += torch.einsum("sbnd,ndc->sbc", grad, weight)
        d_weights.append(torch.einsum("sbnd,sbc->ndc", grad, latent).to(wide.dtype))
    return d_latent, tuple(d_weights)
