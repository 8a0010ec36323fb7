"""What DSA's indexer learns: probabilities of chosen keys, summed over heads."""

from __future__ import annotations

import torch
from torch import Tensor

from checks.fuzz.compare import Comparison
from checks.fuzz.draw import Draw
from checks.fuzz.families.sparse import (
    Config,
    draw_operands,
    hopper_config,
    split_parts,
    triton_config,
)
from checks.fuzz.family import Family
from checks.fuzz.references import attention


def _targets(config: Config, draw: Draw, compare: Comparison) -> None:
    """Probabilities of chosen keys, and of a run of keys, summed over heads."""
    from absorbed_mla.kernels.dsa.kl_target import chosen_target, visible_target

    q, kv, chosen, _, scale = draw_operands(config, draw)
    probs, lse = _probabilities(q, kv, scale, draw)
    operands = split_parts(config, draw, q, kv)
    _compare_chosen(chosen_target(tuple(operands), lse, chosen, scale), probs, chosen, compare)
    first, end = sorted(draw.integer(0, len(q)) for _ in range(2))
    key_start = draw.integer(0, len(kv))
    num_keys = draw.integer(0, len(kv) - key_start)
    offset = draw.choice(None, 0, draw.integer(-len(q), len(kv)))
    own = slice(first, end)
    found = visible_target(tuple(operands), lse, own, key_start, num_keys, offset, scale)
    wanted = probs[:, own, key_start : key_start + num_keys]
    if offset is not None:
        wanted = wanted.tril(offset)
    compare.near("visible", found, wanted, 1e-3 * wanted + 1e-6)


def _probabilities(q: Tensor, kv: Tensor, scale: float, draw: Draw) -> tuple[Tensor, Tensor]:
    """fp64 [B, S_q, S_k], summed over heads, and the LSE fp32 [S_q, B, N], some -inf."""
    operands = q.double(), kv.double()[:, :, None], kv.double()[:, :, None]
    every = torch.ones(len(q), len(kv), dtype=torch.bool, device=q.device)
    attended = attention(*operands, scale, every, q.dtype)
    lse = attended.lse.float()
    lse[draw.uniform(*lse.shape) < 0.1] = -torch.inf
    known = (lse != -torch.inf).permute(1, 2, 0)[..., None]
    return (attended.probs * known).sum(1), lse


def _compare_chosen(found: Tensor, probs: Tensor, chosen: Tensor, compare: Comparison) -> None:
    there = (chosen >= 0).transpose(0, 1)
    wanted = probs.gather(-1, chosen.transpose(0, 1).clamp(min=0).long()).where(there, 0.0)
    compare.near("chosen", found, wanted, 1e-3 * wanted + 1e-6)


def _hopper_target(config: Config, draw: Draw, compare: Comparison) -> None:
    """As ``_targets``, of chosen keys."""
    from absorbed_mla.kernels.hopper.sparse_target import sparse_target

    q, kv, chosen, _, scale = draw_operands(config, draw)
    probs, lse = _probabilities(q, kv, scale, draw)
    operands = tuple(split_parts(config, draw, q, kv))
    _compare_chosen(sparse_target(operands, lse, chosen, scale), probs, chosen, compare)


_DSA = "kernels.dsa"
FAMILIES = (
    Family(
        "sparse-target",
        (f"{_DSA}.kl_target._visible_kernel", f"{_DSA}.kl_target._chosen_kernel"),
        triton_config,
        _targets,
        share=0.7,
    ),
    Family(
        "sparse-target-hopper",
        (
            "kernels.hopper.sparse_target_kernel.sum_sparse_probabilities",
            f"{_DSA}.key_lists._count_kernel",
        ),
        hopper_config,
        _hopper_target,
        hopper=True,
        share=0.7,
    ),
)
