"""Draws a token for every row of logits, by numbers that the row has; on a GPU by own kernels.

A token's weight is its probability relative to the most likely token's, as an integer of scale
2**40: tokens that are less likely than that are never drawn, and sums are exact in any order. A
row's filters leave some tokens, in the order of their logits, the largest first, and of equal ones
in that of the vocabulary:

- ``min_p``: those with at least this share of the most likely token's probability;
- ``top_k``: so many of these;
- ``top_p``: of those, as many as it takes for this part of the sum of their weights.

Of the tokens that are left, in the order of the vocabulary, the row's token is the first one with
which the sum of weights exceeds the row's random number times the whole sum. So filters that leave
all tokens change nothing. A row whose largest logit is NaN or infinite has no token: -1. The tokens
of a CPU are not a GPU's, whose exponential function rounds otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SCALE = 2.0**40
# The temperature, the random number in [0, 1), min_p, top_k (at least the vocabulary's size where
# it is no limit), top_p, and whether the row is sampled: 1, or 0 for the most likely token.
NUM_NUMBERS = 6
# What a GPU's kernels read; other types are converted.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def most_likely(logits: Tensor) -> Tensor:
    """The first token with the largest logit of each row, int64 [rows]; logits and -1 as below."""
    if not logits.is_cuda or not logits.numel():
        return _most_likely(logits)
    # Imported here: machines without a GPU may have no Triton.
    from absorbed_mla.kernels.sampling.argmax import find_most_likely

    return find_most_likely(_readable(logits))


def draw_by_numbers(logits: Tensor, numbers: Tensor, *, filters: bool) -> Tensor:
    """Draw a token for each row.

    A CUDA graph may hold it: nothing waits for the device, and no shape depends on values.

    Args:
        logits: [rows, vocabulary], any floating dtype.
        numbers: float64 [NUM_NUMBERS, rows], any strides.
        filters: Whether a sampled row may have a ``top_k`` or a ``top_p`` that is a limit.

    Returns:
        int64 [rows]; -1 where the largest logit is NaN or infinite.
    """
    if logits.is_cuda and logits.numel():
        from absorbed_mla.kernels.sampling.draw import draw_tokens

        return draw_tokens(_readable(logits), numbers, filters=filters)
    logits = logits.float()
    return draw_by_weights(logits, weigh(logits, numbers), numbers, filters=filters)


def weigh(logits: Tensor, numbers: Tensor) -> Tensor:
    """Weights of all tokens by PyTorch's functions, without those below ``min_p``.

    Args:
        logits: fp32 [rows, vocabulary].
        numbers: As in :func:`draw_by_numbers`.

    Returns:
        int64 [rows, vocabulary].
    """
    temperature, _, min_p = numbers[:3].unsqueeze(-1)
    relative = (logits - logits.amax(-1, keepdim=True)) / temperature.float()
    if relative.is_cuda or not len(relative):
        shares = relative.exp()
    else:
        # A CPU's exp rounds otherwise at the end of a tensor than inside it: rows one by one.
        shares = torch.stack([row.exp() for row in relative])
    shares = shares.masked_fill(~(shares >= min_p), 0)
    return (shares * _SCALE).long()


def draw_by_weights(logits: Tensor, weights: Tensor, numbers: Tensor, *, filters: bool) -> Tensor:
    """:func:`draw_by_numbers` by PyTorch's functions, with a sort, on any device.

    Args:
        logits: fp32 [rows, vocabulary].
        weights: int64 [rows, vocabulary], see :func:`weigh`.
        numbers: As there.
        filters: Likewise.

    Returns:
        int64 [rows].
    """
    _, random, _, top_k, top_p, sampled = numbers.unsqueeze(-1)
    if filters:
        weights = _filtered(weights, logits, top_k, top_p)
    tokens = _most_likely(logits)
    drawn = find_place(weights, random).squeeze(-1)
    return torch.where((sampled.squeeze(-1) > 0) & (tokens >= 0), drawn, tokens)


def find_place(weights: Tensor, random: Tensor) -> Tensor:
    """The first token with which the sum of weights exceeds a part of all of them.

    Args:
        weights: int64 [rows, vocabulary], at least 0.
        random: The part, [rows, 1], from 0 to below 1.

    Returns:
        int64 [rows, 1].
    """
    sums = weights.cumsum(-1)
    total = sums[:, -1:]
    target = (random * total).long().clamp(max=total - 1)
    return torch.searchsorted(sums, target, right=True).clamp(max=weights.shape[-1] - 1)


def _most_likely(logits: Tensor) -> Tensor:
    """:func:`most_likely` by PyTorch's functions."""
    tokens = logits.argmax(-1)
    return tokens.where(logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).isfinite(), -1)


def _readable(logits: Tensor) -> Tensor:
    logits = logits if logits.dtype in _DTYPES else logits.float()
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def _filtered(weights: Tensor, logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Weights of the tokens that ``top_k`` and ``top_p`` leave."""
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    ordered = weights.gather(-1, order)
    rank = torch.arange(weights.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k, 0)
    before = ordered.cumsum(-1) - ordered
    total = ordered.sum(-1, keepdim=True)
    # The token that crosses the limit is left in, so that there is always one.
    limit = (top_p * total).ceil().long().clamp(max=total)
    ordered = ordered.masked_fill(before >= limit, 0)
    return torch.zeros_like(weights).scatter_(-1, order, ordered)
