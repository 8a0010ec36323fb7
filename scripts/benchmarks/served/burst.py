"""A burst: requests that arrive together or one after the other, and when their tokens came.

Nothing but the standard library: processes of any implementation import it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

# Fewer steps with all requests running would be a rate of nothing.
LEAST_STEPS = 4


@dataclass(frozen=True)
class Burst:
    """Requests with random prompts.

    They are all of one size and arrive at once. With several rounds, one request takes the place
    of each that ends, and the sizes vary (:func:`size_range`).
    """

    requests: int  # number of them in flight
    prompt_tokens: int  # of each, or of their middle
    new_tokens: int  # that each generates, whatever they are; likewise
    temperature: float  # 0 is greedy
    seed: int  # of the prompts and sizes; bursts of different seeds share no beginning
    vocab_size: int  # token ids are below it
    rounds: int = 1  # how many times requests there are in all

    @property
    def total(self) -> int:
        """Number of requests in all."""
        return self.requests * self.rounds

    def prompts(self) -> list[list[int]]:
        """Token ids of every prompt."""
        drawn = random.Random(self.seed)
        ids = range(2, self.vocab_size)
        return [drawn.choices(ids, k=prompt) for prompt, _ in self.sizes()]

    def outputs(self) -> list[int]:
        """How many tokens each request generates."""
        return [output for _, output in self.sizes()]

    def sizes(self) -> list[tuple[int, int]]:
        """Tokens of every prompt and output."""
        if self.rounds == 1:
            return [(self.prompt_tokens, self.new_tokens)] * self.requests
        drawn = random.Random(self.seed)
        prompts, outputs = size_range(self.prompt_tokens), size_range(self.new_tokens)
        return [(drawn.randint(*prompts), drawn.randint(*outputs)) for _ in range(self.total)]


class Timeline:
    """When the tokens of a burst came."""

    def __init__(self, burst: Burst) -> None:
        self._burst = burst
        # When every request was sent, in seconds since the burst began.
        self.sent = [0.0] * burst.total
        # Of every request, (seconds since the burst began, tokens that came then).
        self.arrivals: list[list[tuple[float, float]]] = [[] for _ in range(burst.total)]

    def figures(self) -> dict[str, float | None]:
        """What the burst's user sees.

        Returns:
            ``ttft_ms`` (time to first token since a request was sent, the median of the requests),
            ``ttft_mean_ms`` and ``ttft_p90_ms``. Of requests that arrived at once also
            ``input_tokens_per_second`` (prompt tokens over the time until all have a token), and
            ``decode_tokens_per_second`` of the time in which all were generating; None where that
            is less than ``LEAST_STEPS`` steps. With several rounds ``token_ms`` (time per token of
            a request after its first, likewise) and ``token_p90_ms``, None where no output has two
            tokens, and ``output_tokens_per_second`` of the whole burst.

        Raises:
            RuntimeError: If a request has not as many tokens as it was asked for.
        """
        burst, outputs = self._burst, self._burst.outputs()
        for number, (one, asked) in enumerate(zip(self.arrivals, outputs)):
            found = sum(tokens for _, tokens in one)
            if round(found) != asked:
                raise RuntimeError(
                    f"request {number} generated {found:g} tokens instead of {asked}"
                )
        # Requests that arrive at once wait from the beginning on.
        sent = self.sent if burst.rounds > 1 else [0.0] * burst.total
        firsts = sorted(one[0][0] - begin for one, begin in zip(self.arrivals, sent))
        waits: dict[str, float | None] = {
            "ttft_ms": 1e3 * median(firsts),
            "ttft_mean_ms": 1e3 * fmean(firsts),
            "ttft_p90_ms": 1e3 * percentile(firsts, 0.9),
        }
        lasts = [one[-1][0] for one in self.arrivals]
        if burst.rounds == 1:
            inputs = burst.requests * burst.prompt_tokens / firsts[-1]
            rate = self._decode_rate(firsts[-1], min(lasts))
            return waits | {"input_tokens_per_second": inputs, "decode_tokens_per_second": rate}
        each = sorted(
            (one[-1][0] - one[0][0]) / (tokens - 1)
            for one, tokens in zip(self.arrivals, outputs)
            if tokens > 1
        )
        return waits | {
            "token_ms": 1e3 * median(each) if each else None,
            "token_p90_ms": 1e3 * percentile(each, 0.9) if each else None,
            "output_tokens_per_second": sum(outputs) / max(lasts),
        }

    def _decode_rate(self, begin: float, end: float) -> float | None:
        """Of the time from the last first token to the first end."""
        tokens = sum(n for one in self.arrivals for time, n in one if begin < time <= end)
        if end <= begin or tokens < LEAST_STEPS * self._burst.requests:
            return None
        return tokens / (end - begin)


def size_range(tokens: int) -> tuple[int, int]:
    """Half and one and a half times of a number, between which sizes are drawn evenly."""
    return tokens - tokens // 2, tokens + tokens // 2


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest of ascending values that at least ``share`` of them do not exceed."""
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
