"""Fuzz families of DSA's indexer: scores, also cached, their gradients, top-k of the keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from checks.fuzz.compare import Comparison
from checks.fuzz.draw import BF16, FP16, FP32, Draw
from checks.fuzz.families.paged import Requests, draw_cache, draw_requests
from checks.fuzz.families.sparse import COUNT, SUMS, draw_chosen
from checks.fuzz.family import Config, family
from checks.fuzz.references import rounded_squares, rounded_sum

_DSA = "kernels.dsa"
_NUMBERS = 2**23
_E4M3 = torch.float8_e4m3fn


def _configure(config: Config, fp8: bool = False) -> None:
    """In FP8 queries are e4m3, and keys, of ``dtype``, are rounded to it."""
    width = config.choice(*((32,) if fp8 else (16, 32)), 64, 128, 128, 256)
    heads = config.choice(1, 3, 8, 32, 64, 64, 100, 128, config.integer(1, 128))
    dtype = config.choice(BF16, FP16) if fp8 else config.choice(BF16, BF16, FP16, FP32)
    if dtype == FP32:  # which no backend takes on a GPU: what fits its shared memory
        width, heads = min(width, 64), min(heads, 64)
    config.width, config.heads = min(width, config.limit(256, 32)), min(heads, config.limit(128, 5))
    config.dtype, config.fp8, config.relu = dtype, fp8, config.flag(0.7)


def _fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [..., D] and their scales fp32 [...]: the least powers of two with which all fit."""
    largest = x.double().abs().amax(-1).clamp(min=1e-4)
    mantissa, exponent = torch.frexp(largest / 448)
    scales = torch.ldexp(torch.ones_like(largest), exponent - (mantissa == 0.5).int())
    return (x.double() / scales[..., None]).float().to(_E4M3), scales.float()


class Vectors(NamedTuple):
    """Queries and weights as kernels take them, and what they and the keys are in fp64."""

    query: Tensor  # [..., Hi, Di]
    weights: Tensor  # fp32 [..., Hi]; of queries in FP8, times their scales
    exact_query: Tensor
    exact_key: Tensor  # in FP8, as rounded


def _vectors(config: Config, query: Tensor, key: Tensor, weights: Tensor) -> Vectors:
    if not config.fp8:
        return Vectors(query, weights, query.double(), key.double())
    values, scales = _fp8_rows(query)
    rounded, key_scales = _fp8_rows(key)
    exact_key = rounded.float().double() * key_scales.double()[..., None]
    return Vectors(values, weights * scales, values.float().double(), exact_key)


def _weighted(config: Config, vectors: Vectors) -> tuple[Tensor, Tensor]:
    """Scores [B, Q, K] of queries [Q, B, Hi, Di] and keys [K, B, Di], and their noise."""
    q, k = vectors.exact_query.permute(1, 2, 0, 3), vectors.exact_key.permute(1, 2, 0)[:, None]
    weights = vectors.weights.double().permute(1, 2, 0)[..., None]
    dots, squares = q @ k, q.square() @ k.square()
    if config.relu:
        # A product below 0 counts for nothing, unless rounding makes it greater.
        below = 2.0**-9 * squares.sqrt() if config.fp8 else 0.0
        squares = squares.where(dots > -below, 1e-6 * squares)
        dots = dots.relu()
    value = (weights * dots).sum(1)
    squares = (weights.square() * (squares + dots.square())).sum(1)
    return value, rounded_sum(value, squares, config.width * config.heads)


def _compare_scores(name, config, found, vectors, seen, compare: Comparison) -> None:
    """Where keys are seen; FP8's products are summed in the 13 bits that Hopper gives them."""
    value, noise = _weighted(config, vectors)
    dtype = FP32
    if config.fp8:
        dtype, noise = FP16, noise * 2.0**-2
    pairs = (x.where(seen, 0.0)[..., None] for x in (found, value, noise))
    compare.rows(name, *pairs, dtype)


@family("index-scores", f"{_DSA}.index_scores._scores_kernel")
def scores_of_a_run(config: Config, draw: Draw, compare: Comparison) -> None:
    """Of some queries and a run of keys."""
    from absorbed_mla.kernels.dsa.index_scores import index_scores

    _configure(config, fp8=config.flag(0.3))
    batch = draw.choice(1, 1, 2)
    keys = draw.length(draw.limit(3000, 150), 128, least=1)
    most = _NUMBERS // (config.heads * batch * keys)
    queries = draw.length(max(1, min(most, draw.limit(400, 70))), 64, least=1)
    query = draw.normal(queries, batch, config.heads, config.width, dtype=config.dtype)
    key = draw.normal(keys, batch, config.width, dtype=config.dtype)
    weights = draw.normal(queries, batch, config.heads)
    first, end = sorted(draw.integer(0, queries) for _ in range(2))
    key_start = draw.choice(0, draw.integer(0, keys))
    num_keys = draw.choice(keys - key_start, draw.integer(0, keys - key_start))
    offset = draw.choice(None, 0, num_keys - (end - first), draw.integer(-queries, keys))
    vectors = _vectors(config, query, key, weights)
    given_query = vectors.query if config.fp8 else draw.amid_nan(vectors.query)
    own = slice(first, end)
    found = index_scores(
        given_query, draw.amid_nan(key), vectors.weights, own, key_start, num_keys, offset,
        config.relu,
    )  # fmt: skip
    seen = torch.ones(end - first, num_keys, dtype=torch.bool, device=key.device)
    seen = seen if offset is None else seen.tril(offset)
    vectors = vectors._replace(
        weights=vectors.weights[own],
        exact_query=vectors.exact_query[own],
        exact_key=vectors.exact_key[key_start : key_start + num_keys],
    )
    _compare_scores("scores", config, found, vectors, seen, compare)


@family(
    "index-scores-cached",
    *(f"{_DSA}.cached_scores._{name}_kernel" for name in ("locate", "token", "tile")),
)
def scores_over_a_cache(config: Config, draw: Draw, compare: Comparison) -> None:
    """Of new tokens and the keys in the blocks of their requests."""
    from absorbed_mla.kernels.dsa.cached_scores import cached_scores, locate

    _configure(config, fp8=config.flag(0.3))
    config.block_size = config.choice(1, 16, 64, 64, config.integer(1, 100))
    requests = draw_requests(draw, config.heads, draw.limit(3000, 40))
    tokens = requests.tokens
    # A cache of index keys is one of latents without k_rope.
    cached = draw_cache(draw, requests.keys, config.block_size, (config.width, 0), config.dtype)
    query = draw.normal(tokens, config.heads, config.width, dtype=config.dtype)
    weights = draw.normal(tokens, config.heads)
    lists = requests.starts, requests.queries, requests.keys
    most = [max(x, default=0) + draw.choice(0, 3) for x in (requests.queries, requests.keys)]
    places = locate(*(draw.integer_tensor(x) for x in lists), most[0], tokens)
    rows = _located(requests, draw.device)
    for name, found, wanted in zip(("row", "seen", "row_end"), places, rows):
        compare.same(name, found, wanted)
    first, end = sorted(draw.integer(0, tokens) for _ in range(2))
    whole = _vectors(config, query[:, None], query[:0, None, 0], weights[:, None])
    operands = whole.query[:, 0], whole.weights[:, 0], cached.cache, cached.table.int(), places
    found = cached_scores(*operands, slice(first, end), most[1], config.relu, tiles=draw.flag())
    of_requests = zip(cached.keys, requests.starts, requests.queries)
    for row, (keys, start, count) in enumerate(of_requests):
        own = slice(max(start, first), min(start + count, end))
        if own.start >= own.stop:
            continue
        vectors = _vectors(config, query[own][:, None], keys[:, None], weights[own][:, None])
        seen = torch.arange(len(keys), device=keys.device) < rows[1][own][:, None]
        part = found[own.start - first : own.stop - first, : len(keys)][None]
        _compare_scores(f"scores of request {row}", config, part, vectors, seen, compare)


def _located(requests: Requests, device: torch.device) -> Tensor:
    """Row, keys that are seen and end of the row of each token, int32 [3, T]; -1 for none."""
    rows = torch.full((3, requests.tokens), -1, dtype=torch.int32, device=device)
    of_requests = zip(requests.starts, requests.queries, requests.keys)
    for row, (start, count, length) in enumerate(of_requests):
        own = slice(start, start + count)
        rows[0, own], rows[2, own] = row, start + count
        rows[1, own] = torch.arange(length - count + 1, length + 1, device=device).int()
    return rows


def _quarters(
    config: Config, draw: Draw, queries: int, keys: int, batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and weights; multiples of 1/4 up to 2, of which products of rows are exact.

    So a ReLU's side is no matter of rounding.
    """
    shapes = (queries, batch, config.heads, config.width), (keys, batch, config.width)
    query, key = (((draw.integers(17, *shape) - 8) / 4).to(config.dtype) for shape in shapes)
    return query, key, draw.normal(queries, batch, config.heads)


def _made(query: Tensor, weights: Tensor, before: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Gradients that a kernel adds to, and what that of the keys had before."""
    kept = torch.float32 if query.dtype != BF16 else BF16
    made = torch.zeros_like(query, dtype=kept), before.clone(), torch.zeros_like(weights)
    return made, before


@family("index-chosen", f"{_DSA}.index_chosen._chosen_kernel", COUNT, *SUMS)
def scores_of_chosen(config: Config, draw: Draw, compare: Comparison) -> None:
    """Scores of chosen keys, and their gradient, whose sums may be in a fixed order."""
    from absorbed_mla.kernels.dsa.index_chosen import add_chosen_gradient, chosen_scores

    _configure(config)
    config.deterministic = config.flag()
    batch, topk = draw.choice(1, 1, 2), draw.length(draw.limit(2048, 40), 64, least=1)
    keys = draw.length(draw.limit(1500, 60), 64, topk, least=1)
    most = _NUMBERS // (config.heads * batch * max(keys, topk))
    queries = draw.length(max(1, min(most, draw.limit(300, 6))), 16)
    query, key, weights = _quarters(config, draw, queries, keys, batch)
    chosen = draw_chosen(draw, queries, batch, keys, topk)
    place, there = chosen.transpose(0, 1), (chosen >= 0).transpose(0, 1)
    index = place.clamp(min=0).long()
    given = draw.amid_nan(query), draw.amid_nan(key), weights, chosen
    found = chosen_scores(*given, config.relu)
    vectors = _vectors(config, query, key, weights)
    value, noise = (x.gather(-1, index).where(there, 0.0) for x in _weighted(config, vectors))
    compare.rows(
        "scores", found.where(there, 0.0)[..., None], value[..., None], noise[..., None], FP32
    )
    grad = draw.normal(batch, queries, topk).where(there, 0.0)
    made, before = _made(query, weights, draw.normal(keys, batch, config.width))
    add_chosen_gradient(made, grad, *given, config.relu, config.deterministic)
    wide = torch.zeros(batch, queries, keys, dtype=torch.float64, device=key.device)
    wide.scatter_add_(-1, index, grad.double())
    _compare_gradients(config, made, before, vectors, wide, compare)


@family("index-gradient", f"{_DSA}.index_gradient._gradient_kernel")
def gradient_of_a_run(config: Config, draw: Draw, compare: Comparison) -> None:
    """The gradient of scores of a run of keys."""
    from absorbed_mla.kernels.dsa.index_gradient import add_visible_gradient

    _configure(config)
    batch, keys = draw.choice(1, 1, 2), draw.length(draw.limit(1000, 70), 64, least=1)
    most = _NUMBERS // (config.heads * batch * keys)
    queries = draw.length(max(1, min(most, draw.limit(300, 20))), 64, least=1)
    query, key, weights = _quarters(config, draw, queries, keys, batch)
    offset = draw.choice(None, 0, keys - queries, draw.integer(-queries, keys))
    grad = draw.normal(batch, queries, keys)
    grad = grad if offset is None else grad.tril(offset)
    made, before = _made(query, weights, draw.normal(keys, batch, config.width))
    given = draw.amid_nan(query), draw.amid_nan(key), weights
    add_visible_gradient(made, grad, *given, offset, config.relu)
    vectors = _vectors(config, query, key, weights)
    _compare_gradients(config, made, before, vectors, grad.double(), compare)


def _compare_gradients(config, made, before, vectors, grad: Tensor, compare: Comparison) -> None:
    """Gradients of queries, keys and weights.

    The keys' gradient was ``before``, and is added to; ``grad`` fp64 [B, Q, K] is 0 where a key is
    not seen.
    """
    q, k = vectors.exact_query.permute(1, 2, 0, 3), vectors.exact_key.permute(1, 0, 2)[:, None]
    weights = vectors.weights.double().permute(1, 2, 0)[..., None]
    dots = q @ k.transpose(-1, -2)
    of_dots = grad[:, None] * weights
    if config.relu:
        of_dots = of_dots.where(dots > 0, 0.0)
        dots = dots.relu()
    dq, dk = of_dots @ k, (of_dots.transpose(-1, -2) @ q).sum(1)
    lost = rounded_squares(of_dots, config.dtype)
    dq_noise = (lost @ k.square() + dq.square()).sqrt()
    dk_noise = (lost.transpose(-1, -2) @ q.square()).sum(1).sqrt()
    dw = (grad[:, None] * dots).sum(-1)
    squares = (grad[:, None] * dots).square().sum(-1)
    dw_noise = rounded_sum(dw, squares, grad.shape[-1])
    compare.rows("dq", made[0], *(x.permute(2, 0, 1, 3) for x in (dq, dq_noise)), config.dtype)
    dk = dk.permute(1, 0, 2) + before.double()
    old = before.double().abs() * (torch.finfo(FP32).eps / torch.finfo(config.dtype).eps)
    compare.rows("dk", made[1], dk, dk_noise.permute(1, 0, 2) + old, config.dtype)
    compare.rows("dweights", made[2], *(x.permute(2, 0, 1) for x in (dw, dw_noise)), FP32)


@family("select-keys", f"{_DSA}.radix_select._select_kernel")
def best_keys(config: Config, draw: Draw, compare: Comparison) -> None:
    """Exactly the first keys of a stable sort, for scores with ties, infinities, NaN and -0."""
    from absorbed_mla.kernels.dsa.radix_select import radix_select

    topk = config.length(4096, 64, least=1)
    topk = config.choice(1, 64, 512, 2048, 2048, 4096, 8192, topk)
    config.topk = min(topk, config.limit(8192, 40))
    config.counted = config.flag()  # whether rows have lengths of their own
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
