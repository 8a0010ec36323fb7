"""Moving the K and V up-projections across the attention: the two algebraic steps of absorption.

``W_UK`` and ``W_UV`` are per-head views of the live parameters, so both steps train them.
Reference: DeepSeek-V2, arXiv:2405.04434, section 2.1.2 and appendix C.
"""

from __future__ import annotations

import torch
from torch import Tensor


def absorb_query(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """Carry the query into the latent space: ``q_nope . W_UK``, so keys need no expansion.

    Args:
        q_nope: [S, B, N, nope].
        w_uk: [N, nope, C].

    Returns:
        [S, B, N, C].
    """
    return torch.einsum("sbnd,ndc->sbnc", q_nope, w_uk)


def up_project_value(o_latent: Tensor, w_uv: Tensor) -> Tensor:
    """Carry the attended latent to value space: ``o_latent . W_UV^T``, once per query.

    Args:
        o_latent: [S, B, N, C].
        w_uv: [N, v, C].

    Returns:
        [S, B, N, v].
    """
    return torch.einsum("sbnc,nvc->sbnv", o_latent, w_uv)
