"""The learning rate, as a function of the iteration."""

from __future__ import annotations

import math

DECAY_STYLES = ("constant", "cosine", "linear")


def learning_rate(
    iteration: int, *, lr: float, min_lr: float, warmup: int, decay_iters: int, style: str
) -> float:
    """Linear warm-up from 0 to ``lr``, then a decay to ``min_lr``, like Megatron's scheduler.

    Args:
        iteration: Counted from 0.
        lr: Highest rate.
        min_lr: Rate at ``decay_iters`` and after.
        warmup: Iterations of warm-up.
        decay_iters: Iteration at which the decay has ended.
        style: One of :data:`DECAY_STYLES`.
    """
    if iteration < warmup:
        return lr * (iteration + 1) / warmup
    if style == "constant":
        return lr
    if iteration >= decay_iters:
        return min_lr
    done = (iteration - warmup) / max(1, decay_iters - warmup)
    remaining = 1 - done if style == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return min_lr + (lr - min_lr) * remaining
