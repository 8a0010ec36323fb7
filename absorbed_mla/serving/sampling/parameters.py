"""Sampling parameters of a request: how the next token is chosen, and when the request ends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

# Command lines show these parameters before anything that takes seconds to import.
if TYPE_CHECKING:
    from megatron.core.inference.sampling_params import SamplingParams as HostSamplingParams

# Megatron's termination_id for a request that no token ends.
_NO_STOP_TOKEN = -1
_MOST_TOP_LOG_PROBS = 100


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, under the names that vLLM uses.

    The next token is drawn as follows: penalties change the logits; ``temperature`` divides them;
    ``min_p``, then ``top_k``, then ``top_p`` each leave some of the tokens, and one of those that
    are left is drawn by its probability. Which one depends on the logits, on ``seed`` and on the
    token's position, and on nothing else that runs in the engine.

    Attributes:
        max_tokens: Maximum number of tokens to generate; None: as many as fit the context
            and the cache.
        min_tokens: No token that stops the request is drawn before this many others.
        temperature: Divides the logits; 0 takes the most likely token (greedy).
        top_k: Sample from the k most likely tokens only; 0 or -1 means all.
        top_p: Sample from the most likely tokens that together have this probability; 1 means all.
        min_p: Sample from tokens with at least this share of the most likely token's probability.
        repetition_penalty: Positive logits of tokens in the prompt or the output are divided by
            this, negative ones multiplied (Keskar et al., arXiv:1909.05858); 1 changes nothing.
        presence_penalty: Subtracted from the logits of tokens in the output.
        frequency_penalty: Subtracted from them as often as they are in the output.
        n: Number of outputs; each is drawn with a seed of its own.
        seed: None: one derived from the engine's seed and the request's number.
        stop: Strings that end the request as soon as they are in its text.
        stop_token_ids: Tokens that end the request, besides the model's end token.
        ignore_eos: Whether the model's end token does not end the request.
        logprobs: Return the log-probability of each token generated, and of this many most likely
            ones, before penalties, temperature and filters; None for none.
        prompt_logprobs: The same for the tokens of the prompt. Needs an engine with
            ``prompt_logprobs`` and computes the whole prompt, whatever is cached.
        include_stop_str_in_output: Whether the text includes the string of ``stop`` that ended it.
        skip_special_tokens: Whether the text leaves out the tokenizer's special tokens.

    Raises:
        ValueError: On construction, naming the field, what it got and what it accepts.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = field(default=())
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "top_k", max(self.top_k, 0) if self.top_k >= -1 else self.top_k)
        for name, valid, accepted in _CHECKS:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            try:
                accepts = valid(value)
            except TypeError:
                accepts = False
            if not accepts:
                raise ValueError(f"{name} must be {accepted}, got {value!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens {self.max_tokens}, got {self.min_tokens}"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)

    @property
    def has_filters(self) -> bool:
        """Whether only some of the most likely tokens may be drawn."""
        return bool(self.top_k) or self.top_p < 1

    def replace(self, **changes) -> SamplingParams:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_host(self, max_new_tokens: int, *, drafts: bool = False) -> HostSamplingParams:
        """Megatron's parameters of a request.

        Megatron's engine keeps count and looks for tokens that stop the request. It does not
        sample: ``sampler.py`` does.

        Args:
            max_new_tokens: How many tokens the context has room for.
            drafts: Whether a step may add several tokens.
        """
        from megatron.core.inference.sampling_params import SamplingParams as HostSamplingParams

        # Its one termination_id is seen a step earlier than its stop words, but not among drafts.
        first = () if drafts else self.stop_token_ids[:1]
        others = self.stop_token_ids[len(first) :]
        return HostSamplingParams(
            num_tokens_to_generate=min(self.max_tokens or max_new_tokens, max_new_tokens),
            termination_id=first[0] if first else _NO_STOP_TOKEN,
            # Text, which the engine's tokenizer of integers reads as these tokens.
            stop_words=[str(token) for token in others],
            detokenize_stop_sequence=True,
            return_log_probs=self.logprobs is not None or self.prompt_logprobs is not None,
            top_n_logprobs=max(self.logprobs or 0, self.prompt_logprobs or 0),
            skip_prompt_log_probs=self.prompt_logprobs is None,
        )


def _is_count(value: int, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
_TOP = f"from 0 to {_MOST_TOP_LOG_PROBS}, or None"
# Field, what it accepts, and that in words.
_CHECKS = (
    ("max_tokens", lambda x: _is_count(x, 1), "an integer of at least 1, or None"),
    ("min_tokens", lambda x: _is_count(x, 0), "an integer of at least 0"),
    ("temperature", lambda x: 0 <= x < math.inf, "at least 0 (0 is greedy)"),
    ("top_k", lambda x: _is_count(x, 0), "an integer of at least 1, or 0 or -1 for all tokens"),
    ("top_p", lambda x: 0 < x <= 1, "above 0 and at most 1"),
    ("min_p", lambda x: 0 <= x <= 1, "from 0 to 1"),
    # Beyond, logits overflow.
    ("repetition_penalty", lambda x: 1e-3 <= x <= 1e3, "from 0.001 to 1000 (1 is none)"),
    ("presence_penalty", lambda x: -2 <= x <= 2, "from -2 to 2"),
    ("frequency_penalty", lambda x: -2 <= x <= 2, "from -2 to 2"),
    ("n", lambda x: _is_count(x, 1), "an integer of at least 1"),
    ("seed", lambda x: isinstance(x, int) and -(2**63) <= x < 2**63, "an integer of 64 bits"),
    (
        "stop",
        lambda x: all(isinstance(s, str) and s for s in x),
        "a string or several, none of them empty",
    ),
    ("stop_token_ids", lambda x: all(_is_count(t, 0) and t < 2**31 for t in x), "token ids"),
    ("logprobs", lambda x: _is_count(x, 0) and x <= _MOST_TOP_LOG_PROBS, _TOP),
    ("prompt_logprobs", lambda x: _is_count(x, 0) and x <= _MOST_TOP_LOG_PROBS, _TOP),
)
