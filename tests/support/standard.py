"""Whole weights in the standard MLA's layout, as Megatron's checkpoints hold them."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.oracle import OracleMLA
from tests.support import world
from tests.support.harness import PARAMETERS, Setup, shard_dim

KV_UP = "linear_kv_up_proj.weight"


def interleave_heads(mla: OracleMLA, w_uk: Tensor, w_uv: Tensor) -> Tensor:
    """Rows of linear_kv_up_proj: head by head, first its keys', then its values' rows."""
    rows = []
    for head in range(w_uk.shape[0] // mla.nope):
        rows.append(w_uk[head * mla.nope : (head + 1) * mla.nope])
        rows.append(w_uv[head * mla.v : (head + 1) * mla.v])
    return torch.cat(rows)


def separate_heads(mla: OracleMLA, kv_up: Tensor) -> tuple[Tensor, Tensor]:
    """The keys' and the values' rows of a linear_kv_up_proj, or of its gradient."""
    per_head = kv_up.split([mla.nope, mla.v] * (kv_up.shape[0] // (mla.nope + mla.v)))
    return torch.cat(per_head[0::2]), torch.cat(per_head[1::2])


def rank_weights(mla: OracleMLA, setup: Setup, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of every weight, by oracle name."""
    parts = {}
    for name, weight in weights.items():
        dim = shard_dim(name, setup)
        parts[name] = weight if dim is None else world.own_part(weight, dim)
    return parts


def standard_state_dict(
    mla: OracleMLA, setup: Setup, weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    """This rank's state dict of MLASelfAttention with local norms."""
    parts = {n: p.to(setup.dtype) for n, p in rank_weights(mla, setup, weights).items()}
    combined = interleave_heads(mla, parts.pop("w_uk"), parts.pop("w_uv"))
    return {**{PARAMETERS[n][0][0]: p.clone() for n, p in parts.items()}, KV_UP: combined}
