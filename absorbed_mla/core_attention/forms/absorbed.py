"""The absorbed form: W_UK multiplies the query, W_UV the output; attention is over the latent."""

from __future__ import annotations

import torch
from torch import Tensor

from absorbed_mla.absorb import (
    absorb_query,
    absorb_query_in_inference,
    up_project_value,
    up_project_value_in_inference,
)
from absorbed_mla.core_attention.forms.base import BlockGradients, Query
from absorbed_mla.core_attention.types import AttentionInputs
from absorbed_mla.rope import rotate_tail


class AbsorbedForm:
    """Multi-query attention: all heads share one key, [latent | k_rope], and one value, the latent.

    The query is the absorbed query [S, B, N, C] and the rotated q_rope [S, B, N, R].
    """

    absorb_query = staticmethod(absorb_query)
    absorb_query_in_inference = staticmethod(absorb_query_in_inference)
    up_project_value = staticmethod(up_project_value)
    up_project_value_in_inference = staticmethod(up_project_value_in_inference)

    def query(self, q, w_uk, cos, sin):
        """See ``Form``; memory of its own, which recomputation frees."""
        q_nope, q_rope = _parts(rotate_tail(q, cos, sin, len(w_uk)), w_uk)
        return self.absorb_query(q_nope, w_uk), q_rope.clone(memory_format=torch.contiguous_format)

    def query_in_inference(self, q, w_uk, cos, sin):
        """:meth:`query` without gradient, whose q_rope is a part of ``q``."""
        q_nope, q_rope = _parts(rotate_tail(q, cos, sin, len(w_uk)), w_uk)
        return self.absorb_query_in_inference(q_nope, w_uk), q_rope

    def weights(self, w_uk, w_uv):
        """None: W_UK is in the query, and W_UV is applied to the output."""
        return ()

    def output(self, core_out, w_uv):
        """The attended latent, up-projected by W_UV once per query."""
        return self.up_project_value(core_out, w_uv)

    def output_in_inference(self, core_out, w_uv):
        """:meth:`output` without gradient."""
        return self.up_project_value_in_inference(core_out, w_uv)

    def widths(self, dims):
        """See ``Form``."""
        return dims.kv_down_dim, dims.kv_lora_rank

    def forward(self, query, kv, weights, backend, rules):
        """See ``Form``; the output is [S, B, N, C]."""
        return backend.forward(_inputs(query, kv), rules)

    def backward(self, grad, output, query, kv, weights, backend, rules):
        """See ``Form``."""
        found = backend.backward(grad, output, _inputs(query, kv), rules)
        dkv = _rejoin(found.k_content.squeeze(2), found.k_rope)
        return BlockGradients((found.q_content, found.q_rope), dkv, ())


def _parts(q: Tensor, w_uk: Tensor) -> tuple[Tensor, Tensor]:
    """Views q_nope [S, B, N, nope] and q_rope [S, B, N, R] of ``q`` [S, B, N * (nope + R)]."""
    heads, nope, _ = w_uk.shape
    width = q.shape[-1] // heads
    q_nope, q_rope = q.view(*q.shape[:2], heads, width).split((nope, width - nope), dim=-1)
    return q_nope, q_rope


def _rejoin(latent: Tensor, k_rope: Tensor) -> Tensor:
    """[latent | k_rope] of its two parts, without a copy where they are views of one tensor."""
    whole = latent._base
    if whole is not None and whole is k_rope._base and whole.ndim == latent.ndim:
        widths = latent.shape[-1], k_rope.shape[-1]
        if whole.shape == (*latent.shape[:-1], sum(widths)):
            return whole
    return torch.cat((latent, k_rope), dim=-1)


def _inputs(query: Query, kv: Tensor) -> AttentionInputs:
    """The absorbed query, and the latent as key and value of all heads."""
    q_content, q_rope = query
    c = q_content.shape[-1]
    # Not split(), nor indices: these cost the host three times as much.
    latent, k_rope = kv.split_with_sizes((c, kv.shape[-1] - c), -1)
    return AttentionInputs(q_content, q_rope, latent.unsqueeze(2), k_rope, None)
