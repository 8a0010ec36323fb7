"""Counter-based attention dropout: what is dropped depends on seed, batch, head, query and key.

Both forms, any chunk size and any context-parallel layout therefore drop the same probabilities,
and backward computes the pattern again instead of storing it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = 24
# The multipliers of MurmurHash3's 64-bit finalizer and of splitmix64, as signed integers.
_MIX = (-0x00AE502812AA7333, -0x3B314601E57A13AD)
_STEP = -0x61C8864680B583EB


def keep_factors(
    rate: float, seed: int, *, batch: Tensor, heads: Tensor, queries: Tensor, keys: Tensor
) -> Tensor:
    """0 where a probability is dropped, 1 / (1 - rate) elsewhere; fp32 [B, N, Q, K].

    Args:
        rate: Probability to be dropped.
        seed: Seed of the pattern.
        batch: int64 [B], index of each sequence in the batch.
        heads: int64 [N], index of each head.
        queries: int64 [Q], token index of each query.
        keys: int64 [K], token index of each key.
    """
    rows = _hash(_hash(_hash(batch + seed)[:, None] + heads)[..., None] + queries)
    draw = _hash(rows[..., None] + _hash(keys))
    uniform = (draw >> (64 - _BITS)) & ((1 << _BITS) - 1)
    return (uniform >= rate * (1 << _BITS)).float() / (1 - rate)


def _hash(x: Tensor) -> Tensor:
    """A bijection of int64 whose every output bit depends on every input bit."""
    x = x * _STEP
    for factor in _MIX:
        x = (x ^ _shift_right(x, 33)) * factor
    return x ^ _shift_right(x, 33)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift in zeros, as for unsigned integers."""
    return (x >> bits) & torch.iinfo(torch.int64).max >> (bits - 1)
