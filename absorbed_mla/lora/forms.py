"""Both forms of the attention with LoRA on W_UK and W_UV.

Neither has a merged weight, which in bf16 would round most of a small update away.

absorbed: two small products beside each of the two of ``absorb.py``, ::

    q_nope . (W_UK + B_k A_k) = q_nope . W_UK + (q_nope . B_k) . A_k
    o_latent . (W_UV + B_v A_v)^T = o_latent . W_UV^T + (o_latent . A_v^T) . B_v^T

expanded: the latent is extended by ``A latent``, r channels for each of the two, and the weights by
B. Keys and values are expanded from that as from any latent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from absorbed_mla.absorb import (
    absorb_query,
    absorb_query_in_inference,
    up_project_value,
    up_project_value_in_inference,
)
from absorbed_mla.batch_invariant import is_enabled
from absorbed_mla.core_attention.forms.absorbed import AbsorbedForm
from absorbed_mla.core_attention.forms.base import BlockGradients
from absorbed_mla.core_attention.forms.expanded import ExpandedForm
from absorbed_mla.lora.low_rank import LowRank


class UpProjections(NamedTuple):
    """LoRA of W_UK and W_UV of one attention; None where a weight has none."""

    k_up: LowRank | None
    v_up: LowRank | None


class LoRAAbsorbedForm(AbsorbedForm):
    """The absorbed form; see the module.

    Args:
        up: LoRA of the two weights.
    """

    def __init__(self, up: UpProjections) -> None:
        self.up = up

    def absorb_query(self, q_nope, w_uk):
        """See the base class."""
        return self._absorbed(absorb_query, q_nope, w_uk)

    def absorb_query_in_inference(self, q_nope, w_uk):
        """See the base class."""
        return self._absorbed(absorb_query_in_inference, q_nope, w_uk)

    def up_project_value(self, o_latent, w_uv):
        """See the base class."""
        return self._up_projected(up_project_value, o_latent, w_uv)

    def up_project_value_in_inference(self, o_latent, w_uv):
        """See the base class."""
        return self._up_projected(up_project_value_in_inference, o_latent, w_uv)

    def _absorbed(self, absorb, q_nope, w_uk):
        if (lora := self.up.k_up) is None:
            return absorb(q_nope, w_uk)
        a, b = lora.of_heads(w_uk.shape[1])
        begun = lora.begin_product(lambda: absorb(q_nope, b), len(q_nope))
        absorbed, between = absorb(q_nope, w_uk), begun()
        if between is None:
            return absorbed
        if absorb is absorb_query or not _takes_sums(absorbed):
            return absorbed + between @ a
        absorbed.view(-1, absorbed.shape[-1]).addmm_(between.flatten(0, -2), a)
        return absorbed

    def _up_projected(self, up_project, o_latent, w_uv):
        if (lora := self.up.v_up) is None:
            return up_project(o_latent, w_uv)
        a, b = lora.of_heads(w_uv.shape[1])
        begun = lora.begin_product(lambda: F.linear(o_latent, a), len(o_latent))
        values, between = up_project(o_latent, w_uv), begun()
        if between is None:
            return values
        if up_project is up_project_value or not _takes_sums(values):
            return values + up_project(between, b)
        by_head, between = (x.flatten(0, 1).transpose(0, 1) for x in (values, between))
        by_head.baddbmm_(between, b.transpose(1, 2))
        return values


class LoRAExpandedForm(ExpandedForm):
    """The expanded form; see the module.

    Args:
        chunk_size: As in the base class.
        up: LoRA of the two weights.
    """

    def __init__(self, chunk_size: int, up: UpProjections) -> None:
        super().__init__(chunk_size)
        self.up = up

    def weights(self, w_uk, w_uv):
        """Both up-projections, A of both [R, C], and B of each [N, rows of a head, R].

        R counts the rows of A; B is zero in the columns of the other's.
        """
        ones = [
            self._factors(one, weight) for one, weight in zip(self.up, (w_uk, w_uv), strict=True)
        ]
        (a_k, b_k), (a_v, b_v) = ones
        a = torch.cat((a_k, a_v))
        return w_uk, w_uv, a, F.pad(b_k, (0, len(a_v))), F.pad(b_v, (len(a_k), 0))

    def forward(self, query, kv, weights, backend, rules):
        """See ``Form``."""
        return super().forward(query, _extended(kv, weights), _joined(weights), backend, rules)

    def backward(self, grad, output, query, kv, weights, backend, rules):
        """See ``Form``."""
        extended = _extended(kv, weights)
        found = super().backward(grad, output, query, extended, _joined(weights), backend, rules)
        a = weights[2]
        r, c = a.shape
        d_latent, d_low, d_rope = found.kv.split((c, r, kv.shape[-1] - c), dim=-1)
        dkv = torch.cat((d_latent + d_low @ a.to(d_low.dtype), d_rope), dim=-1)
        latent = kv[..., :c].flatten(0, 1).to(d_low.dtype)
        da = d_low.flatten(0, 1).t() @ latent
        (dw_uk, db_k), (dw_uv, db_v) = (one.split((c, r), dim=-1) for one in found.weights)
        return BlockGradients(found.query, dkv, (dw_uk, dw_uv, da, db_k, db_v))

    def _factors(self, one: LowRank | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        heads, head_dim, c = weight.shape
        if one is None:
            return weight.new_zeros(0, c), weight.new_zeros(heads, head_dim, 0)
        return one.of_heads(head_dim)


def _takes_sums(out: Tensor) -> bool:
    """Whether a product without gradient is added in place: not in parity mode."""
    return out.is_contiguous() and not is_enabled(out.device)


def _extended(kv: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    """[latent | A latent | k_rope]."""
    a = weights[2]
    latent, k_rope = kv.split((a.shape[1], kv.shape[-1] - a.shape[1]), dim=-1)
    return torch.cat((latent, F.linear(latent, a), k_rope), dim=-1)


def _joined(weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """[W | B] of both."""
    w_uk, w_uv, _, b_k, b_v = weights
    return torch.cat((w_uk, b_k), dim=-1), torch.cat((w_uv, b_v), dim=-1)
