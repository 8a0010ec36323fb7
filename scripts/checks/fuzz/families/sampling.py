"""Fuzz families of sampling: a row's most likely token, or one drawn with filters.

A drawn token is right if the row's random number falls into the token's part of the probabilities
that the filters leave, with what rounding may move: the edges of these parts by ``_EDGE`` of the
whole, ``min_p`` and ``top_p`` by as much. ``top_k`` and the order of equal logits are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from checks.fuzz.compare import Comparison
from checks.fuzz.draw import BF16, FP16, FP32, Draw
from checks.fuzz.family import Config, family

# fp32's exponential, of fp32's differences of logits up to 90 or so, and their sums.
_EDGE = 1e-5
_SCALE = 2.0**40
# Logits of a case.
_NUMBERS = 2**22
_SAMPLING = "kernels.sampling"
_BLOCK_ARGMAX = f"{_SAMPLING}.argmax._block_argmax_kernel"


def _configure(config: Config) -> None:
    """Tokens of the vocabulary and of a program, and whether filters are in use."""
    block = config.often(2048, 256, 1024) if config.device.type == "cuda" else 64
    vocabulary = config.choice(1, 2, 32000, 129280, config.length(20000, block, least=1))
    config.vocabulary, config.block = min(vocabulary, config.limit(130000, 300)), block
    config.dtype, config.filters = config.choice(BF16, BF16, FP16, FP32), config.flag(0.7)


def _logits(config: Config, draw: Draw, rows: int) -> Tensor:
    logits = draw.normal(rows, config.vocabulary, magnitude=draw.often(2.0, 0.1, 10.0))
    kind = draw.choice("any", "any", "ties", "special")
    if kind == "ties":
        logits = logits.round()
    if kind == "special":
        for value in (torch.nan, torch.inf):
            logits[draw.uniform(*logits.shape) < 0.5 / config.vocabulary] = value
        logits[draw.uniform(*logits.shape) < 0.3] = -torch.inf
        logits[draw.uniform(rows) < 0.1] = -torch.inf
    return logits.to(config.dtype)


def _given(logits: Tensor, draw: Draw) -> Tensor:
    """In half of all draws with NaN behind each row, as padding of a vocabulary is."""
    if draw.flag():
        return logits
    padded = logits.new_full((len(logits), logits.shape[1] + draw.integer(1, 99)), torch.nan)
    padded[:, : logits.shape[1]] = logits
    return padded[:, : logits.shape[1]]


def _most_likely(logits: Tensor) -> Tensor:
    """The first of the largest logits; -1 where that is NaN or infinite."""
    wide = logits.double()
    # As integers: argmax says nothing of which one of equals it takes.
    place = torch.arange(logits.shape[1], device=logits.device)
    largest = wide.amax(-1, keepdim=True)
    first = place.where(wide == largest, logits.shape[1]).amin(-1)
    return first.where(largest.squeeze(-1).isfinite(), -1)


@family("most-likely", _BLOCK_ARGMAX, f"{_SAMPLING}.argmax._argmax_kernel", share=0.5)
def most_likely_tokens(config: Config, draw: Draw, compare: Comparison) -> None:
    """Of every row."""
    from absorbed_mla.kernels.sampling.argmax import find_most_likely

    _configure(config)
    rows = draw.length(draw.limit(300, 9), 16, least=1)
    logits = _logits(config, draw, max(1, min(rows, _NUMBERS // config.vocabulary)))
    found = find_most_likely(_given(logits, draw), config.block)
    compare.same("tokens", found, _most_likely(logits))


def _numbers(config: Config, draw: Draw, rows: int) -> Tensor:
    """float64 [6, rows]: temperature, random number, min_p, top_k, top_p, whether sampled."""
    columns = []
    for _ in range(rows):
        top_k, top_p = config.vocabulary, 1.0
        if config.filters:
            top_k = draw.choice(top_k, 1, 50, draw.integer(1, config.vocabulary))
            top_p = draw.choice(1.0, 0.9, 0.5, 1e-6, draw.random.random())
        min_p = draw.choice(0.0, 0.0, 0.1, 1.0, draw.random.random())
        temperature = draw.choice(1.0, 0.7, 0.05, 5.0)
        random = draw.choice(0.0, 1 - 2.0**-53, draw.random.random(), draw.random.random())
        top_k = min(top_k, config.vocabulary)
        columns.append([temperature, random, min_p, top_k, top_p, float(draw.flag(0.9))])
    return draw.integer_tensor(columns, torch.float64).T


@family(
    "draw-tokens",
    _BLOCK_ARGMAX,
    f"{_SAMPLING}.softmax_weights._softmax_weights_kernel",
    f"{_SAMPLING}.thresholds._threshold_kernel",
    f"{_SAMPLING}.inverse_cdf._inverse_cdf_kernel",
)
def drawn_tokens(config: Config, draw: Draw, compare: Comparison) -> None:
    """Some rows are not sampled, some have logits that no token can be drawn by."""
    from absorbed_mla.kernels.sampling.draw import draw_tokens

    _configure(config)
    rows = draw.length(draw.limit(64, 6), 16, least=1)
    rows = max(1, min(rows, _NUMBERS // config.vocabulary))
    logits, numbers = _logits(config, draw, rows), _numbers(config, draw, rows)
    given = numbers if draw.flag() else numbers.contiguous()
    found = draw_tokens(_given(logits, draw), given, filters=config.filters, block=config.block)
    most_likely = _most_likely(logits)
    greedy = (numbers[5] == 0) | (most_likely < 0)
    compare.holds("tokens", greedy & (found != most_likely), found, most_likely)
    inside = ((found >= 0) & (found < config.vocabulary)) | (most_likely < 0)
    compare.holds("tokens in the vocabulary", ~inside, found, most_likely)
    clean = logits.masked_fill(greedy[:, None], 0.0)
    right = greedy | may_be_drawn(clean, numbers, found.clamp(0, config.vocabulary - 1))
    compare.holds("drawn tokens", ~right, found, most_likely)


def may_be_drawn(logits: Tensor, numbers: Tensor, tokens: Tensor) -> Tensor:
    """Whether the random numbers may fall into the tokens' parts, bool [rows].

    Rounding may leave any tokens between the fewest and the most that ``min_p`` and ``top_p``
    leave when they are moved to either side. The logits are without NaN.
    """
    fewest, most = _weights_left(logits, numbers, 1), _weights_left(logits, numbers, -1)
    own = most.gather(-1, tokens[:, None])
    begin = fewest.cumsum(-1).gather(-1, tokens[:, None]) - own
    end, random = most.cumsum(-1).gather(-1, tokens[:, None]), numbers[1][:, None]
    whole = most.sum(-1, keepdim=True)
    edge = _EDGE * whole + 1
    reached = begin - edge <= random * whole
    fits = reached & (random * fewest.sum(-1, keepdim=True) <= end + edge) & (own > 0)
    return fits[:, 0]


def _weights_left(logits: Tensor, numbers: Tensor, moved: int) -> Tensor:
    """Weights [rows, vocabulary] behind the filters, moved to leave fewer (1) or more (-1)."""
    temperature, _, min_p, top_k, top_p = (x[:, None] for x in numbers[:5])
    wide = logits.double()
    most = wide.amax(-1, keepdim=True)
    share = torch.exp(torch.where(wide == most, 0.0, wide - most) / temperature)
    # The most likely token stays with a ``min_p`` of 1.
    share = share.masked_fill(share < (min_p * (1 + moved * _EDGE)).clamp(max=1.0), 0.0)
    weights = (share * _SCALE).floor()
    order = wide.sort(dim=-1, descending=True, stable=True).indices
    ordered = weights.gather(-1, order)
    rank = torch.arange(wide.shape[1], device=wide.device)
    ordered = ordered.masked_fill(rank >= top_k, 0.0)
    before = ordered.cumsum(-1) - ordered
    limit = top_p - moved * _EDGE * (top_p < 1)
    first = ordered * (rank == 0)
    ordered = ordered.masked_fill(before >= limit * ordered.sum(-1, keepdim=True), 0.0)
    # One token is always left.
    ordered = torch.where((ordered.sum(-1, keepdim=True) > 0), ordered, first)
    return torch.zeros_like(weights).scatter_(-1, order, ordered)


@family("token-weights", "testing.token_probabilities._weights_kernel", share=0.3)
def weights_of_tokens(config: Config, draw: Draw, compare: Comparison) -> None:
    """What the kernels keep for themselves: shares of the most likely token's probability."""
    from absorbed_mla.testing.token_probabilities import kernel_weights

    _configure(config)
    rows = max(1, min(draw.length(draw.limit(64, 6), 16), _NUMBERS // config.vocabulary))
    logits = _logits(config, draw, rows).nan_to_num(0.0, 1.0, -5.0)
    numbers = _numbers(config, draw, rows)
    found = kernel_weights(logits, numbers)
    wide = logits.double()
    relative = (wide - wide.amax(-1, keepdim=True)) / numbers[0][:, None]
    share, min_p = relative.exp(), numbers[2][:, None]
    wanted = (share * _SCALE).floor()
    tolerance = wanted * _EDGE * (1 + relative.abs() / 10) + 1
    error = (found.double() - wanted.where(share >= min_p, 0.0)).abs()
    near_min_p = (share - min_p).abs() <= _EDGE * (1 + relative.abs() / 10) * share
    compare.holds("weights", (error > tolerance) & ~near_min_p, found, wanted)
