"""How good a sampled text is, between 0 and 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Reward = Callable[[Sequence[int], int], float]


def _share(satisfies: Callable[[int], bool]) -> Reward:
    """Of the tokens asked for, those that satisfy a rule; what was not sampled does not."""

    def reward(tokens: Sequence[int], asked: int) -> float:
        return sum(map(satisfies, tokens)) / asked

    return reward


def _pair_share(satisfies: Callable[[int, int], bool]) -> Reward:
    """The same of neighbours."""

    def reward(tokens: Sequence[int], asked: int) -> float:
        return sum(map(satisfies, tokens, tokens[1:])) / max(1, asked - 1)

    return reward


# Of sampled tokens and the number that was asked for. A token is a byte; 256 ends a text.
REWARDS: dict[str, Reward] = {
    "digits": _share(lambda token: 48 <= token <= 57),
    "letters": _share(lambda token: 65 <= token <= 90 or 97 <= token <= 122),
    "even": _share(lambda token: token % 2 == 0),
    "alternating": _pair_share(lambda token, following: (token + following) % 2 == 1),
    "ascending": _pair_share(lambda token, following: token < following < 256),
}


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Rewards of one prompt's samples, normalised to mean 0 and deviation 1 (arXiv:2402.03300).

    All are 0 where the rewards are equal: there is nothing to prefer.
    """
    mean = sum(rewards) / len(rewards)
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    return [(reward - mean) / deviation if deviation > 1e-6 else 0.0 for reward in rewards]
