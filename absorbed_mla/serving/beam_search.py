"""Beam search: the likeliest texts after a prompt, from log-probs of ordinary requests.

Rules are those of transformers' ``generate(num_beams=..., early_stopping=False)``, whose sequences
it finds; parameters and outputs have vLLM's names.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from absorbed_mla.serving.option_schema import Options, documented, option
from absorbed_mla.serving.outputs import PositionLogprobs, RequestOutput
from absorbed_mla.serving.sampling.parameters import SamplingParams


@documented
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams(Options):
    """How ``LLM.beam_search`` looks for texts.

    Raises:
        ValueError: On construction, naming the field, what it got and what it accepts.
    """

    beam_width: int = option(least=1, most=64)
    """Texts that are continued at a time, and returned."""
    max_tokens: int = option(least=1)
    """Most tokens to generate."""
    ignore_eos: bool = option(False)
    """The model's end token does not end a text."""
    temperature: float = option(0.0, least=0)
    """Above 0: a token that is drawn with it may continue a text, too, besides the likeliest ones.
    Log-probabilities are those before it."""
    length_penalty: float = option(1.0)
    """A text's log-probability is divided by its number of tokens to this power; above 0 favours
    long texts."""

    def of_requests(self, num_ends: int, vocab_size: int) -> SamplingParams:
        """Parameters of the requests that find the next token of each text.

        Args:
            num_ends: Number of tokens that end a text: so many may not continue it.
        """
        count = min(self.beam_width + num_ends, vocab_size)
        return SamplingParams(
            max_tokens=1, temperature=self.temperature, logprobs=count, ignore_eos=True
        )


@dataclass
class BeamSearchSequence:
    """A text that was found.

    Attributes:
        tokens: Token ids, the prompt's included.
        logprobs: Of each generated token and the likeliest ones in its place.
        cum_logprob: Sum over the generated tokens.
        text: Of all tokens, special ones included; None without a tokenizer.
        finish_reason: ``"stop"`` (end token), ``"length"``, or None while it may go on.
    """

    tokens: list[int]
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None


@dataclass
class BeamSearchOutput:
    """The texts that were found for one prompt, best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The search for one prompt.

    Args:
        prompt: Token ids.
        max_tokens: Most tokens to generate.
        ends: Tokens that end a text.
        cache_salt: Of the prompt; also an attribute.

    Attributes:
        running: Texts that need a next token, best first; empty when the search is over.
        ended: The best texts that have ended, best first.
    """

    def __init__(
        self,
        prompt: list[int],
        params: BeamSearchParams,
        max_tokens: int,
        ends: Collection[int],
        cache_salt: str | None = None,
    ) -> None:
        self._params, self._max_tokens, self._ends = params, max_tokens, ends
        self.cache_salt = cache_salt
        self.running = [BeamSearchSequence(prompt)]
        self.ended: list[BeamSearchSequence] = []

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """Take the next token of each text that runs.

        Args:
            outputs: Of the requests for them, in their order.

        Raises:
            RuntimeError: If one of them has failed or was aborted.
        """
        found = []
        for beam, output in zip(self.running, outputs):
            [one] = output.outputs
            if not one.logprobs:
                why = one.error or one.finish_reason
                raise RuntimeError(f"a request of the beam search has ended: {why}")
            [place] = one.logprobs
            found += [(beam.cum_logprob + e.logprob, beam, t, place) for t, e in place.items()]
        found.sort(key=lambda candidate: candidate[0], reverse=True)
        width, length = self._params.beam_width, len(self.running[0].logprobs) + 1
        at_most = length == self._max_tokens
        # Of those that end, only the best ones of all count.
        ended = [
            _longer(*one, "stop" if one[2] in self._ends else "length")
            for one in found[:width]
            if at_most or one[2] in self._ends
        ]
        self.ended = sorted([*self.ended, *ended], key=self._score, reverse=True)[:width]
        going_on = [one for one in found if one[2] not in self._ends][:width]
        self.running = [] if at_most else [_longer(*one, None) for one in going_on]
        # As if the best one ended here.
        best = max(map(self._score, self.running[:1]), default=-math.inf)
        if len(self.ended) == width and best <= self._score(self.ended[-1]):
            self.running = []

    def _score(self, beam: BeamSearchSequence) -> float:
        return beam.cum_logprob / len(beam.logprobs) ** self._params.length_penalty


def _longer(
    cum_logprob: float,
    beam: BeamSearchSequence,
    token: int,
    place: PositionLogprobs,
    finish_reason: str | None,
) -> BeamSearchSequence:
    return BeamSearchSequence(
        [*beam.tokens, token],
        [*beam.logprobs, place],
        cum_logprob,
        finish_reason=finish_reason,
    )
