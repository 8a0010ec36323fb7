"""Fuzz families of MoE: router logits, top-k, token permutation, grouped GEMM, SwiGLU, unpermute.

Experts are compared as sets, token by token. Another set than the reference's is right only where
rounding decides: where the last score that is chosen, or the last group's, and the first that is
not differ by less than ``_TIE`` of the largest one. Equal logits are no such case: of equal scores
the expert with the lower number comes first. Scores are compared for the kernel's own experts.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from checks.fuzz.compare import Comparison
from checks.fuzz.draw import BF16, FP16, FP32, Draw
from checks.fuzz.family import Config, family
from checks.fuzz.references import product, rounded_sum

_TIE = 1e-5
_NUMBERS = 2**25
_MOE, _INVARIANT = "kernels.moe", "kernels.invariant"


def _configure_choice(config: Config) -> None:
    """Options of ``choose_experts``; ``size`` experts in a group, 0 parts: logits are whole."""
    groups = config.groups = config.choice(None, 2, 3, 4, 8, config.integer(2, 10))
    most = config.limit(512, 40)
    size = config.choice(1, 2, 4, 32, 16, 64, config.integer(1, 60))
    if groups is None:
        size = min(most, config.choice(8, 64, 160, 256, 384, 512, config.integer(1, 512)))
    else:
        size = max(1, min(size, most // groups))
    group_topk = config.group_topk = None if groups is None else config.integer(1, groups)
    topk = min(config.choice(1, 2, 4, 6, 8, 8, config.integer(1, 12)), size * (group_topk or 1))
    ranked_by = config.choice(None, 1, 2, config.integer(1, size)) if group_topk else None
    if ranked_by is not None:
        ranked_by = min(ranked_by, size)
    elif group_topk:
        topk = max(topk, group_topk)  # a group is ranked by one expert at least
    config.size, config.topk, config.group_score_topk = size, topk, ranked_by
    config.softmax, config.biased = config.flag(), config.flag()
    config.normalize = config.choice(None, False, True)
    most_parts = max(1, 2048 >> (size * (groups or 1) - 1).bit_length())
    config.parts = config.choice(0, config.integer(1, min(most_parts, 40)))
    config.dtype = config.choice(FP32, FP32, BF16, FP16)  # of whole logits; parts are fp32


def _choose(config: Config, logits: Tensor, bias: Tensor | None, scale: float | None):
    """The one place that calls the kernel."""
    from absorbed_mla.kernels.moe.choice import choose_experts

    names = "softmax", "groups", "group_topk", "normalize", "group_score_topk"
    options = {name: getattr(config, name) for name in names}
    return choose_experts(logits, config.topk, bias=bias, scale=scale, **options)


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


@family("choose-experts", f"{_MOE}.choice._choice_kernel", share=1.5)
def choice(config: Config, draw: Draw, compare: Comparison) -> None:
    """Experts of every token, and their scores."""
    _configure_choice(config)
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


@family("router-logits", f"{_MOE}.logits._logits_kernel")
def router_logits(config: Config, draw: Draw, compare: Comparison) -> None:
    """Of few tokens, in parts."""
    from absorbed_mla.kernels.moe.logits import partial_logits

    width = config.choice(512, 2048, 7168, config.length(8000, 256, 128, least=1))
    config.width = min(width, config.limit(8000, 600))
    experts = config.choice(8, 64, 256, config.integer(1, 300))
    config.experts = min(experts, config.limit(512, 40))
    config.dtype = config.choice(BF16, BF16, FP16, FP32)
    tokens = draw.length(draw.limit(512, 20), 16, 32, 64, 128)
    x = draw.normal(tokens, config.width, dtype=config.dtype)
    weight = draw.normal(config.experts, config.width, dtype=config.dtype)
    found = partial_logits(draw.amid_nan(x), weight)
    compare.rows("logits", found.double().sum(0), *product(x, weight.T), FP32)


@family("expert-order", f"{_MOE}.order._order_kernel", share=0.5)
def order_of_tokens(config: Config, draw: Draw, compare: Comparison) -> None:
    """By expert, of ``count`` experts of this rank from the first one on."""
    from absorbed_mla.kernels.moe.order import order_by_expert

    config.count = config.choice(1, 8, 64, 256, config.integer(1, 300))
    config.topk, config.first = config.integer(1, 10), config.choice(0, 0, config.integer(1, 300))
    tokens = draw.length(draw.limit(9000, 120) // config.topk, 16, 64, least=1)
    end = draw.choice(config.first + config.count, config.first + 2 * config.count, 1)
    chosen = draw.integers(end, tokens, config.topk)
    choices, rows, places, ends = order_by_expert(chosen, config.count, config.first)
    own = chosen.flatten() - config.first
    own = own.where((own >= 0) & (own < config.count), config.count)
    order = own.sort(stable=True).indices
    compare.same("choices", choices, order)
    compare.same("tokens", rows, order // config.topk)
    wanted = torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=order.device)
    )
    compare.same("places", places, wanted.view_as(chosen))
    counts = own.bincount(minlength=config.count + 1)[: config.count]
    compare.same("ends", ends, counts.cumsum(0).int())


@family("expert-sums", f"{_MOE}.sums._sums_kernel", share=0.5)
def sums_of_experts(config: Config, draw: Draw, compare: Comparison) -> None:
    """In the order of the choices, rounded once; or of the rows, rounded after each."""
    from absorbed_mla.kernels.moe.sums import summed

    width = config.choice(1, 512, 7168, config.length(config.limit(4000, 90), 1024, 64, least=1))
    config.width, config.topk = min(width, config.limit(8000, 90)), config.integer(1, 10)
    config.one_by_one, config.dtype = config.flag(), config.choice(BF16, FP16, FP32)
    tokens = draw.length(draw.limit(200, 8), 16)
    count = tokens * config.topk
    rows = draw.normal(count, config.width, dtype=config.dtype)
    places = torch.argsort(draw.uniform(count)).view(tokens, config.topk)
    last = draw.choice(count, draw.integer(0, count))
    rows[last:] = torch.nan
    ends = draw.integer_tensor([*sorted(draw.integer(0, last) for _ in range(3)), last])
    found = summed(rows, places, ends, one_by_one=config.one_by_one)
    if config.one_by_one:
        ordered = places.sort(-1).values
        total = torch.zeros(tokens, config.width, device=rows.device)
        for place in ordered.unbind(-1):
            part = rows[place].float().where((place < last)[:, None], 0.0)
            total = (total + part).to(config.dtype).float()
        compare.same("sums", found, total.to(config.dtype))
        return
    taken = rows.double()[places].where((places < last)[..., None], 0.0)
    squares, value = taken.square().sum(1), taken.sum(1)
    compare.rows("sums", found, value, rounded_sum(value, squares, 1, config.dtype), config.dtype)


@family("swiglu", f"{_MOE}.swiglu._swiglu_kernel", share=0.5)
def gates(config: Config, draw: Draw, compare: Comparison) -> None:
    """Of rows of experts, times their probabilities, or of any rows."""
    from absorbed_mla.kernels.moe.swiglu import gated, swiglu

    most = config.limit(4000, 90)
    width = config.choice(1, 2048, 1536, config.length(most, 1024, 2048, least=1))
    config.width, config.dtype = min(width, most), config.choice(BF16, BF16, FP16, FP32)
    config.probs, config.routed = config.choice(FP32, config.dtype), config.flag(0.7)
    config.rounds_each_step = config.flag()
    tokens, topk = draw.length(draw.limit(200, 8), 16), draw.integer(1, 8)
    rows = tokens * topk
    both = draw.normal(rows, 2 * config.width, dtype=config.dtype, magnitude=draw.often(1.0, 4.0))
    gate, up = both.double().chunk(2, -1)
    wanted, last = torch.nn.functional.silu(gate) * up, rows
    if config.routed:
        probs = draw.uniform(tokens, topk).to(config.probs)
        choices = torch.argsort(draw.uniform(rows))
        last = draw.choice(rows, draw.integer(0, rows))
        ends = draw.integer_tensor([draw.integer(0, last), last])
        found = swiglu(both, probs, choices, ends, rounds_each_step=config.rounds_each_step)
        wanted = wanted * probs.double().flatten()[choices][:, None]
    else:
        found = gated(both, rounds_each_step=config.rounds_each_step)
    roundings = 3 if config.rounds_each_step else 1
    wanted = wanted[:last]
    compare.rows("rows", found[:last], wanted, wanted.abs() * roundings, config.dtype)


def _configure_product(config: Config) -> None:
    """Sizes of an expert's product, and whether its rows are taken from others."""
    most = config.limit(4096, 90)
    columns = config.choice(64, 512, 2048, config.length(2048, 64, 128, least=1))
    summands = config.choice(64, 512, 2048, 4096, config.length(4500, 64, 128, 2048, least=1))
    columns, summands = min(columns, most), min(summands, most)
    experts = config.choice(1, 3, 8, 16, config.integer(1, 40))
    config.experts = max(1, min(experts, _NUMBERS // (columns * summands), config.limit(64, 4)))
    config.columns, config.summands = columns, summands
    config.taken, config.dtype = config.flag(), config.choice(BF16, BF16, FP16, FP32)


class _Rows(NamedTuple):
    """What a grouped product is called with, and rows and their ends for the reference."""

    x: Tensor
    weights: Tensor
    ends: Tensor
    tokens: Tensor | None
    rows: Tensor
    bounds: list[int]


def _draw_rows(config: Config, draw: Draw) -> _Rows:
    most = draw.limit(300, 12)
    lengths = [draw.choice(0, draw.length(most, 16, 64), 1) for _ in range(config.experts)]
    bounds = list(accumulate(lengths, initial=0))
    ends = draw.integer_tensor(bounds[1:])
    # At least one row: the products of none are not launched.
    count = max(1, bounds[-1] + draw.choice(0, draw.integer(0, 5)))
    weights = draw.normal(config.experts, config.columns, config.summands, dtype=config.dtype)
    if config.taken:
        source = draw.normal(max(1, count // 2), config.summands, dtype=config.dtype)
        tokens = draw.integers(len(source), count)
        return _Rows(source, weights, ends, tokens, source[tokens], bounds)
    rows = draw.normal(count, config.summands, dtype=config.dtype)
    return _Rows(rows, weights, ends, None, rows, bounds)


def _compare_products(config: Config, found: Tensor, drawn: _Rows, compare: Comparison) -> None:
    for expert, (begin, end) in enumerate(pairwise(drawn.bounds)):
        if begin < end:
            exact = product(drawn.rows[begin:end], drawn.weights[expert].T, config.dtype)
            compare.rows(f"rows of expert {expert}", found[begin:end], *exact, config.dtype)
    shape = len(drawn.rows), config.columns
    compare.same("shape", torch.tensor(found.shape), torch.tensor(shape))


@family("few-rows-product", f"{_MOE}.skinny_gemm._few_rows_kernel")
def products_of_few_rows(config: Config, draw: Draw, compare: Comparison) -> None:
    """Rows by their expert's matrix."""
    from absorbed_mla.kernels.moe.skinny_gemm import few_rows_product

    _configure_product(config)
    drawn = _draw_rows(config, draw)
    found = few_rows_product(*drawn[:4])
    _compare_products(config, found, drawn, compare)


@family(
    "grouped-product",
    f"{_INVARIANT}.grouped_product._grouped_kernel",
    f"{_INVARIANT}.matrix_product._product_kernel",
    f"{_INVARIANT}.matrix_product._add_kernel",
)
def grouped_products(config: Config, draw: Draw, compare: Comparison) -> None:
    """Also, an expert's rows get the bits of matrix products of their own, one for each leaf."""
    from absorbed_mla.batch_invariant.tree import tree_sum
    from absorbed_mla.kernels.invariant.grouped_product import grouped_product
    from absorbed_mla.kernels.invariant.matrix_product import matrix_product

    _configure_product(config)
    config.leaves = config.choice(None, None, 1, 2, 4, 8)
    leaves = config.leaves or 1
    config.summands += -config.summands % leaves
    drawn = _draw_rows(config, draw)
    found = grouped_product(*drawn[:4], leaves=config.leaves)
    _compare_products(config, found, drawn, compare)
    expert = draw.integer(0, config.experts - 1)
    own = slice(*drawn.bounds[expert : expert + 2])
    pairs = zip(drawn.rows[own].chunk(leaves, 1), drawn.weights[expert].T.chunk(leaves))
    part = config.leaves and config.summands
    sums = [matrix_product(*pair, dtype=FP32, part=part) for pair in pairs]
    alone = tree_sum(sums).to(config.dtype)
    if found.is_cuda:
        compare.same("rows of an expert alone", found[own], alone)
    else:
        # The interpreter's products are NumPy's, which round by their shape on some CPUs.
        compare.near("rows of an expert alone", found[own], alone, 0.01)
