"""The two executions of one equation: attend over the latent, or over keys and values.

A form has two steps. ``up_project`` makes the large per-head tensors (what ``mla_up_proj``
recomputation drops and makes again); ``attend`` runs the attention over them. A form that expands
inside the attention, in chunks, returns little from the first step and works in the second.
"""

from __future__ import annotations

import logging
from typing import Protocol

from torch import Tensor

from absorbed_mla.absorb import absorb_query, absorbed_is_cheaper, expand_latent, up_project_value
from absorbed_mla.core_attention.backend import AttentionBackend
from absorbed_mla.core_attention.scores import ScoreRules
from absorbed_mla.dims import MLADims

logger = logging.getLogger(__name__)


class Form(Protocol):
    """One execution of latent attention. Shapes: see ``absorbed_mla.dims``."""

    def up_project(
        self, q_nope: Tensor, latent: Tensor, w_uk: Tensor, w_uv: Tensor
    ) -> tuple[Tensor, ...]:
        """Per-head tensors that ``attend`` needs, new ones or views of ``q_nope``."""
        ...

    def attend(
        self,
        per_head: tuple[Tensor, ...],
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        w_uv: Tensor,
        backend: AttentionBackend,
        rules: ScoreRules,
    ) -> tuple[Tensor, Tensor]:
        """Output [S, B, N, v] and LSE [S, B, N]."""
        ...


class AbsorbedForm:
    """Multi-query attention over the one latent head [latent | k_rope]."""

    def up_project(self, q_nope, latent, w_uk, w_uv):
        """The absorbed query [S, B, N, C]."""
        return (absorb_query(q_nope, w_uk),)

    def attend(self, per_head, q_rope, latent, k_rope, w_uv, backend, rules):
        """Attend over the latent, then up-project the value once per query."""
        (q_latent,) = per_head
        o_latent, lse = backend.attention(
            q_latent, q_rope, latent.unsqueeze(2), k_rope, None, rules
        )
        return up_project_value(o_latent, w_uv), lse


class ExpandedForm:
    """Multi-head attention over keys and values expanded from the latent."""

    def up_project(self, q_nope, latent, w_uk, w_uv):
        """q_nope, k_nope [S, B, N, nope] and the value [S, B, N, v]."""
        return q_nope, expand_latent(latent, w_uk), expand_latent(latent, w_uv)

    def attend(self, per_head, q_rope, latent, k_rope, w_uv, backend, rules):
        """Attend over the expanded heads; k_rope stays one head."""
        q_nope, k_nope, value = per_head
        return backend.attention(q_nope, q_rope, k_nope, k_rope, value, rules)


_FORMS: dict[str, Form] = {"absorbed": AbsorbedForm(), "expanded": ExpandedForm()}
_logged: set[str] = set()


def select_form(name: str, dims: MLADims, q_tokens: int, kv_tokens: int) -> Form:
    """The form called ``name``; for ``"auto"`` the cheaper one, logged the first time."""
    if name == "auto":
        name = resolve_auto(dims, q_tokens, kv_tokens)
        if name not in _logged:
            _logged.add(name)
            logger.info(
                "form='auto' runs %s: fewer operations for %d query and %d key tokens",
                name,
                q_tokens,
                kv_tokens,
            )
    return _FORMS[name]


def resolve_auto(dims: MLADims, q_tokens: int, kv_tokens: int) -> str:
    """Name of the form with fewer floating-point operations."""
    cheaper = absorbed_is_cheaper(
        q_tokens,
        kv_tokens,
        kv_lora_rank=dims.kv_lora_rank,
        nope=dims.qk_nope_head_dim,
        rope=dims.qk_rope_head_dim,
        v=dims.v_head_dim,
    )
    return "absorbed" if cheaper else "expanded"
