"""The choice of the best keys by their scores."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from checks.fuzz.compare import Comparison
from checks.fuzz.draw import Draw
from checks.fuzz.family import Family


class SelectConfig(NamedTuple):
    """How many keys are chosen, and whether rows have lengths of their own."""

    topk: int
    counted: bool


def _select_config(draw: Draw) -> SelectConfig:
    topk = draw.choice(1, 64, 512, 2048, 2048, 4096, 8192, draw.length(4096, 64, least=1))
    return SelectConfig(min(topk, draw.limit(8192, 40)), draw.flag())


def _select(config: SelectConfig, draw: Draw, compare: Comparison) -> None:
    """Exactly the first keys of a stable sort, for scores with ties, infinities, NaN and -0."""
    from absorbed_mla.kernels.dsa.radix_select import radix_select

    batch = 1 if config.counted else draw.choice(1, 1, 2)
    most = draw.limit(40000, 300)
    keys = draw.length(most, config.topk, 4096, 1024)
    queries = draw.length(max(1, min(draw.limit(300, 6), 2**22 // max(keys, 1))), 132, 16)
    scores = draw.normal(batch, queries, keys, magnitude=draw.often(1.0, 1e-3, 1e30))
    kind = draw.choice("any", "ties", "few values", "equal", "special")
    if kind == "ties":
        scores = (scores * 8).round() / 8
    elif kind == "few values":
        scores = scores.sign()
    elif kind == "equal":
        scores = torch.zeros_like(scores)
    elif kind == "special":
        for value, share in ((torch.nan, 0.02), (torch.inf, 0.02), (-torch.inf, 0.2), (-0.0, 0.1)):
            scores[draw.uniform(*scores.shape) < share] = value
    padded = torch.full((batch, queries, keys + 5), torch.nan, device=scores.device)
    padded[..., :keys] = scores
    key_start, offset, seen = draw.integer(0, 100), None, None
    count = torch.full((queries,), keys, device=scores.device)
    if config.counted:
        key_start, seen = 0, draw.integers(keys + 1, queries, dtype=torch.int32)
        count = seen
    elif draw.flag():
        offset = draw.choice(0, keys - queries, draw.integer(-queries, keys))
        count = (torch.arange(queries, device=scores.device) + offset + 1).clamp(0, keys)
    found = radix_select(padded[..., :keys], config.topk, key_start, offset, seen=seen)
    compare.same("keys", found, _best(scores, count, config.topk, key_start).int())


def _best(scores: Tensor, count: Tensor, topk: int, key_start: int) -> Tensor:
    """[Q, B, topk], ascending, then -1."""
    keys = scores.shape[-1]
    place = torch.arange(keys, device=scores.device)
    seen = place < count[:, None]
    wide = scores.double().nan_to_num(torch.inf, torch.inf, -torch.inf) + 0.0
    # What is not seen comes behind the lowest score.
    order = wide.where(seen, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    # Of scores of -inf the seen ones come first: they have lower numbers.
    order = order[..., :topk]
    chosen = order.where(torch.arange(order.shape[-1], device=place.device) < count[:, None], keys)
    chosen = F.pad(chosen, (0, topk - chosen.shape[-1]), value=keys)
    chosen = chosen.sort(-1).values
    return (chosen + key_start).where(chosen < keys, -1).transpose(0, 1)


FAMILIES = (
    Family(
        "select-keys",
        ("kernels.dsa.radix_select._select_kernel",),
        _select_config,
        _select,
    ),
)
