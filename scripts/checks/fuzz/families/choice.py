"""The experts of every token from the router's logits, and these logits of few tokens.

Experts are compared as sets, token by token. Another set than the reference's is right only where
rounding decides: where the last score that is chosen, or the last group's, and the first that is
not differ by less than ``_TIE`` of the largest one. Equal logits are no such case: of equal scores
the expert with the lower number comes first. Scores are compared for the kernel's own experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from checks.fuzz.compare import Comparison
from checks.fuzz.draw import BF16, FP16, FP32, Draw
from checks.fuzz.family import Family
from checks.fuzz.references import product

_TIE = 1e-5


class Config(NamedTuple):
    """What the kernel is compiled for.

    Attributes:
        groups: Of experts; None: one.
        size: Experts of a group.
        group_topk: Groups whose experts may be chosen, or None.
        topk: K.
        group_score_topk: Experts by which a group is ranked; None: ``topk // group_topk``.
        softmax: Whether scores are softmax's, else sigmoid's.
        normalize: Whether chosen scores are divided by their sum; None: several of sigmoid's are.
        biased: Whether a bias is added for the choice.
        parts: Parts of the logits; 0: they are whole.
        dtype: Of whole logits; parts are fp32.
    """

    groups: int | None
    size: int
    group_topk: int | None
    topk: int
    group_score_topk: int | None
    softmax: bool
    normalize: bool | None
    biased: bool
    parts: int
    dtype: torch.dtype


def _config(draw: Draw) -> Config:
    groups = draw.choice(None, 2, 3, 4, 8, draw.integer(2, 10))
    most = draw.limit(512, 40)
    size = draw.choice(1, 2, 4, 32, 16, 64, draw.integer(1, 60))
    if groups is None:
        size = min(most, draw.choice(8, 64, 160, 256, 384, 512, draw.integer(1, 512)))
    else:
        size = max(1, min(size, most // groups))
    group_topk = None if groups is None else draw.integer(1, groups)
    topk = draw.choice(1, 2, 4, 6, 8, 8, draw.integer(1, 12))
    topk = min(topk, size * (group_topk or 1))
    ranked_by = draw.choice(None, 1, 2, draw.integer(1, size)) if group_topk else None
    if ranked_by is not None:
        ranked_by = min(ranked_by, size)
    elif group_topk:
        topk = max(topk, group_topk)  # a group is ranked by one expert at least
    experts = size * (groups or 1)
    most_parts = max(1, 2048 >> (experts - 1).bit_length())
    parts = draw.choice(0, draw.integer(1, min(most_parts, 40)))
    dtype = draw.choice(FP32, FP32, BF16, FP16)
    normalize = draw.choice(None, False, True)
    rules = group_topk, topk, ranked_by, draw.flag(), normalize, draw.flag()
    return Config(groups, size, *rules, parts, dtype)


def _choose(config: Config, logits: Tensor, bias: Tensor | None, scale: float | None):
    """The one place that calls the kernel."""
    from absorbed_mla.kernels.moe.choice import choose_experts

    return choose_experts(
        logits,
        config.topk,
        softmax=config.softmax,
        bias=bias,
        groups=config.groups,
        group_topk=config.group_topk,
        scale=scale,
        normalize=config.normalize,
        group_score_topk=config.group_score_topk,
    )


class _Wanted(NamedTuple):
    """Scores fp64 [T, E], the experts [T, K], and the tokens that rounding decides."""

    scores: Tensor
    experts: Tensor
    tied: Tensor


def _first(values: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The first ones of a stable sort, and whether the next one is near, but not equal."""
    ordered = values.sort(dim=-1, descending=True, stable=True)
    chosen = ordered.indices[..., :number]
    if number == values.shape[-1]:
        return chosen, torch.zeros_like(values[..., 0], dtype=torch.bool)
    gap = ordered.values[..., number - 1] - ordered.values[..., number]
    return chosen, (gap > 0) & (gap < _TIE * values.abs().nan_to_num(0, 0, 0).amax(-1))


def _expected(config: Config, logits: Tensor, bias: Tensor | None) -> _Wanted:
    logits = logits.double()
    scores = logits.softmax(-1) if config.softmax else logits.sigmoid()
    keys = scores if bias is None else scores + bias.double()
    tied = torch.zeros_like(keys[..., 0], dtype=torch.bool)
    if config.group_topk:
        of_groups = keys.unflatten(-1, (config.groups, config.size))
        ranked_by = config.group_score_topk or config.topk // config.group_topk
        totals = of_groups.topk(ranked_by, -1).values.sum(-1)
        groups, tied = _first(totals, config.group_topk)
        # Sums of several scores may be equal, or not, by rounding.
        if ranked_by > 1 and config.group_topk < config.groups:
            ordered = totals.sort(-1, descending=True).values
            gap = ordered[..., config.group_topk - 1] - ordered[..., config.group_topk]
            tied = gap < _TIE * totals.abs().amax(-1)
        allowed = torch.zeros_like(totals, dtype=torch.bool).scatter_(-1, groups, True)
        keys = keys.masked_fill(~allowed.repeat_interleave(config.size, -1), -torch.inf)
    experts, last_tied = _first(keys, config.topk)
    return _Wanted(scores, experts, tied | last_tied)


def _run(config: Config, draw: Draw, compare: Comparison) -> None:
    experts = config.size * (config.groups or 1)
    tokens = draw.length(draw.limit(600, 12), 16, least=1)
    magnitude = draw.often(1.0, 0.1, 5.0)
    if config.parts:
        logits = draw.normal(config.parts, tokens, experts, magnitude=magnitude)
        logits = logits / config.parts**0.5
        whole = logits.double().sum(0)
    else:
        logits = draw.normal(tokens, experts, dtype=config.dtype, magnitude=magnitude)
        whole = logits
    bias = draw.normal(experts, magnitude=0.1) if config.biased else None
    scale = draw.choice(None, 2.5)
    found, chosen = _choose(config, logits, bias, scale)
    wanted = _expected(config, whole, bias)
    ordered = chosen.sort(-1).values
    unlike = (ordered != wanted.experts.sort(-1).values).any(-1) & ~wanted.tied
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    outside = ((chosen < 0) | (chosen >= experts)).any(-1)
    compare.holds("experts", unlike | twice | outside, chosen, wanted.experts)
    weights = wanted.scores.gather(-1, chosen)
    megatrons = not config.softmax and config.topk > 1
    if megatrons if config.normalize is None else config.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * (scale or 1.0)
    # The score of a sum of parts is as exact as fp32's sum.
    tolerance = torch.finfo(logits.dtype).eps * weights + 1e-5 * weights + 1e-7
    compare.near("scores", found, weights, tolerance)


class LogitsConfig(NamedTuple):
    """Widths of the router's product."""

    width: int
    experts: int
    dtype: torch.dtype


def _logits_config(draw: Draw) -> LogitsConfig:
    most = draw.limit(8000, 600)
    width = draw.choice(512, 2048, 7168, draw.length(8000, 256, 128, least=1))
    experts = draw.choice(8, 64, 256, draw.integer(1, 300))
    dtype = draw.choice(BF16, BF16, FP16, FP32)
    return LogitsConfig(min(width, most), min(experts, draw.limit(512, 40)), dtype)


def _logits(config: LogitsConfig, draw: Draw, compare: Comparison) -> None:
    from absorbed_mla.kernels.moe.logits import partial_logits

    tokens = draw.length(draw.limit(512, 20), 16, 32, 64, 128)
    x = draw.normal(tokens, config.width, dtype=config.dtype)
    weight = draw.normal(config.experts, config.width, dtype=config.dtype)
    found = partial_logits(draw.amid_nan(x), weight)
    compare.rows("logits", found.double().sum(0), *product(x, weight.T), FP32)


FAMILIES = (
    Family("choose-experts", ("kernels.moe.choice._choice_kernel",), _config, _run, share=1.5),
    Family("router-logits", ("kernels.moe.logits._logits_kernel",), _logits_config, _logits),
)
