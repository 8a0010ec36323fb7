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
    """When tokens came.

    Args:
        burst: Whose tokens they are.
    """

    def __init__(self, burst: Burst) -> None:
        self._burst = burst
        # When every request was sent, in seconds since the burst began.
        self.sent = [0.0] * burst.total
        # Of every request, (seconds since the burst began, tokens that came then).
        self.arrivals: list[list[tuple[float, float]]] = [[] for _ in range(burst.total)]

    def add(self, request: int, seconds: float, tokens: int) -> None:
        """Note tokens of a request."""
        self.arrivals[request].append((seconds, tokens))

    def figures(self) -> dict[str, float | None]:
        """What the burst's user sees.

        Returns:
            ``seconds`` until the last token, ``ttft_ms`` (time to first token, the median of the
            requests), ``ttft_mean_ms`` and ``ttft_p90_ms``, ``input_tokens_per_second`` (prompt
            tokens over the time until all requests have a token), and, of the time in which all
            requests were generating, ``decode_tokens_per_second`` and ``step_ms``; these two are
            None where that is less than ``LEAST_STEPS`` steps. With several rounds ``seconds``,
            ``ttft_ms``, ``ttft_mean_ms`` and ``ttft_p90_ms`` since each request was sent,
            ``token_ms`` (time per token of a request after its first, likewise) and
            ``token_p90_ms``, None where no output has two tokens, and
            ``output_tokens_per_second`` of the whole burst.

        Raises:
            RuntimeError: If a request has not as many tokens as it was asked for.
        """
        for number, (one, asked) in enumerate(zip(self.arrivals, self._burst.outputs())):
            found = sum(tokens for _, tokens in one)
            if round(found) != asked:
                raise RuntimeError(
                    f"request {number} generated {found:g} tokens instead of {asked}"
                )
        return self._together() if self._burst.rounds == 1 else self._in_turn()

    def _together(self) -> dict[str, float | None]:
        """Of requests that arrived at once."""
        burst = self._burst
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
            "ttft_mean_ms": 1e3 * fmean(firsts),
            "ttft_p90_ms": 1e3 * percentile(firsts, 0.9),
            "input_tokens_per_second": burst.requests * burst.prompt_tokens / begin,
            "decode_tokens_per_second": rate,
            "step_ms": None if rate is None else 1e3 * burst.requests / rate,
        }

    def _in_turn(self) -> dict[str, float | None]:
        """Of requests of which each took the place of one that had ended."""
        outputs = self._burst.outputs()
        seconds = max(one[-1][0] for one in self.arrivals)
        firsts = sorted(one[0][0] - sent for one, sent in zip(self.arrivals, self.sent))
        each = sorted(
            (one[-1][0] - one[0][0]) / (tokens - 1)
            for one, tokens in zip(self.arrivals, outputs)
            if tokens > 1
        )
        return {
            "seconds": seconds,
            "ttft_ms": 1e3 * median(firsts),
            "ttft_mean_ms": 1e3 * fmean(firsts),
            "ttft_p90_ms": 1e3 * percentile(firsts, 0.9),
            "token_ms": 1e3 * median(each) if each else None,
            "token_p90_ms": 1e3 * percentile(each, 0.9) if each else None,
            "output_tokens_per_second": sum(outputs) / seconds,
        }


def size_range(tokens: int) -> tuple[int, int]:
    """Half and one and a half times of a number, between which sizes are drawn evenly."""
    return tokens - tokens // 2, tokens + tokens // 2


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest of ascending values that at least ``share`` of them do not exceed."""
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
