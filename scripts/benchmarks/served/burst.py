"""A burst: requests that arrive together, and when their tokens came.

Nothing but the standard library: processes of any implementation import it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

# Fewer steps with all requests running would be a rate of nothing.
LEAST_STEPS = 4


@dataclass(frozen=True)
class Burst:
    """Requests with random prompts, all of one size.

    Attributes:
        requests: Number of them.
        prompt_tokens: Of each.
        new_tokens: That each generates, whatever they are.
        temperature: 0 is greedy.
        seed: Of the prompts; bursts of different seeds share no beginning.
        vocab_size: Token ids are below it.
    """

    requests: int
    prompt_tokens: int
    new_tokens: int
    temperature: float
    seed: int
    vocab_size: int

    def prompts(self) -> list[list[int]]:
        """Token ids of every prompt."""
        drawn = random.Random(self.seed)
        ids = range(2, self.vocab_size)
        return [drawn.choices(ids, k=self.prompt_tokens) for _ in range(self.requests)]


class Timeline:
    """When tokens came.

    Args:
        burst: Whose tokens they are.
    """

    def __init__(self, burst: Burst) -> None:
        self._burst = burst
        # Of every request, (seconds since the burst began, tokens that came then).
        self.arrivals: list[list[tuple[float, float]]] = [[] for _ in range(burst.requests)]

    def add(self, request: int, seconds: float, tokens: int) -> None:
        """Note tokens of a request."""
        self.arrivals[request].append((seconds, tokens))

    def figures(self) -> dict[str, float | None]:
        """What the burst's user sees.

        Returns:
            ``seconds`` until the last token, ``ttft_ms`` (time to first token, the median of the
            requests) and ``ttft_p90_ms``, ``input_tokens_per_second`` (prompt tokens over the time
            until all requests have a token), and, of the time in which all requests were
            generating, ``decode_tokens_per_second`` and ``step_ms``; these two are None where that
            is less than ``LEAST_STEPS`` steps.

        Raises:
            RuntimeError: If a request has not as many tokens as it was asked for.
        """
        burst = self._burst
        for number, one in enumerate(self.arrivals):
            if round(sum(tokens for _, tokens in one)) != burst.new_tokens:
                raise RuntimeError(
                    f"request {number} generated {sum(tokens for _, tokens in one):g} tokens "
                    f"instead of {burst.new_tokens}"
                )
        firsts = sorted(one[0][0] for one in self.arrivals)
        lasts = [one[-1][0] for one in self.arrivals]
        begin, end = firsts[-1], min(lasts)
        tokens = sum(n for one in self.arrivals for time, n in one if begin < time <= end)
        rate = None
        if end > begin and tokens >= LEAST_STEPS * burst.requests:
            rate = tokens / (end - begin)
        return {
            "seconds": max(lasts),
            "ttft_ms": 1e3 * median(firsts),
            "ttft_p90_ms": 1e3 * percentile(firsts, 0.9),
            "input_tokens_per_second": burst.requests * burst.prompt_tokens / begin,
            "decode_tokens_per_second": rate,
            "step_ms": None if rate is None else 1e3 * burst.requests / rate,
        }


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest of ascending values that at least ``share`` of them do not exceed."""
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
