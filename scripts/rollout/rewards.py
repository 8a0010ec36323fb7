"""Rewards of sampled tokens, from 0 to 1, and advantages from the rewards of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Of the sampled tokens and the number of tokens that were requested. Stopping early does not pay.
Reward = Callable[[Sequence[int], int], float]


def _share(satisfies: Callable[[int], bool]) -> Reward:
    """Share of the requested tokens that satisfy a condition."""

    def reward(tokens: Sequence[int], requested: int) -> float:
        return sum(map(satisfies, tokens)) / requested

    return reward


def _pair_share(satisfies: Callable[[int, int], bool]) -> Reward:
    """Share of the requested pairs of neighbouring tokens that satisfy a condition."""

    def reward(tokens: Sequence[int], requested: int) -> float:
        return sum(map(satisfies, tokens, tokens[1:])) / max(1, requested - 1)

    return reward


# A token is a byte; 256 ends a text.
REWARDS: dict[str, Reward] = {
    "digits": _share(lambda token: 48 <= token <= 57),
    "letters": _share(lambda token: 65 <= token <= 90 or 97 <= token <= 122),
    "even": _share(lambda token: token % 2 == 0),
    "alternating": _pair_share(lambda token, following: (token + following) % 2 == 1),
    "ascending": _pair_share(lambda token, following: token < following < 256),
}


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Rewards of one prompt's samples, normalised to mean 0 and deviation 1 (arXiv:2402.03300).

    All advantages are 0 where the rewards are equal.
    """
    mean = sum(rewards) / len(rewards)
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    return [(reward - mean) / deviation if deviation > 1e-6 else 0.0 for reward in rewards]
