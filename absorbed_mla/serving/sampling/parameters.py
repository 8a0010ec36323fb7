"""Sampling parameters of a request: how the next token is chosen, and when the request ends."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from absorbed_mla.serving.option_schema import Options, documented, option, options_of
from absorbed_mla.serving.structured_output.parameters import StructuredOutputsParams

# Command lines show these parameters before anything that takes seconds to import.
if TYPE_CHECKING:
    from megatron.core.inference.sampling_params import SamplingParams as HostSamplingParams

TokenSequences = Sequence[Sequence[int]]
# Megatron's termination_id for a request that no token ends.
_NO_STOP_TOKEN = -1
_MOST_TOP_LOG_PROBS = 100


# Of a request, so that looking for their ends costs a step little.
_MOST_STOPS, _MOST_STOP_CHARACTERS, _MOST_STOP_TOKENS = 64, 4096, 256
# Of a request, so that reading them, a microsecond each, costs the others little.
_MOST_BIASES, _MOST_ALLOWED = 1024, 2**14
_MOST_WORDS, _MOST_PARTS_OF_WORDS = 256, 4096


def _are_stops(texts: Sequence[Any]) -> bool:
    if len(texts) > _MOST_STOPS or not all(isinstance(text, str) and text for text in texts):
        return False
    return sum(map(len, texts)) <= _MOST_STOP_CHARACTERS


def _are_token_ids(tokens: Iterable[Any]) -> bool:
    ints = (isinstance(token, int) and not isinstance(token, bool) for token in tokens)
    return all(ints) and all(0 <= token < 2**31 for token in tokens)


def _without_arrays(value: Any) -> Any:
    """Python's number for one of numpy's or torch's, which is no JSON; a list for an array."""
    return value.tolist() if hasattr(value, "tolist") else value


def _are_biases(biases: Any) -> bool:
    if not isinstance(biases, Mapping) or len(biases) > _MOST_BIASES:
        return False
    if not _are_token_ids(biases):
        return False
    return all(-100 <= bias <= 100 for bias in biases.values())


def _are_words(words: Sequence[Any]) -> bool:
    if len(words) > _MOST_WORDS or sum(map(len, words)) > _MOST_PARTS_OF_WORDS:
        return False
    return all(word and (isinstance(word, str) or _are_token_ids(word)) for word in words)


@documented
@dataclass(frozen=True, kw_only=True)
class SamplingParams(Options):
    """Sampling parameters of one request, under the names that vLLM uses.

    The next token is drawn as follows: ``logit_bias``, then penalties change the logits, and tokens
    that are not allowed lose theirs; ``temperature`` divides them; ``min_p``, then ``top_k``, then
    ``top_p`` each leave some of the tokens, and one of those that are left is drawn by its
    probability. Which one depends on the logits, on ``seed`` and on the token's position, and on
    nothing else that runs in the engine.

    Raises:
        ValueError: On construction, naming the field, what it got and what it accepts.
    """

    max_tokens: int | None = option(16, least=1)
    """Most tokens to generate; None: as many as fit the context and the cache."""
    min_tokens: int = option(0, least=0)
    """No token that stops the request is drawn before this many others."""
    temperature: float = option(1.0, least=0, note=" (0 is greedy)")
    """Divides the logits; 0: the most likely token."""
    top_k: int = option(0, least=1, also=(0, -1), note=" for all tokens")
    """Sample from so many of the most likely tokens; 0: from all."""
    top_p: float = option(1.0, above=0, most=1)
    """Sample from the most likely tokens that together have this probability."""
    min_p: float = option(0.0, least=0, most=1)
    """Sample from tokens with at least this share of the most likely one's probability."""
    # Beyond these bounds, logits overflow.
    repetition_penalty: float = option(1.0, least=1e-3, most=1000, note=" (1 is none)")
    """Positive logits of tokens in the prompt or the output are divided by this, negative ones
    multiplied. Keskar et al., arXiv:1909.05858."""
    presence_penalty: float = option(0.0, least=-2, most=2)
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = option(0.0, least=-2, most=2)
    """Subtracted from the logits of tokens as often as they are in the output."""
    logit_bias: Mapping[int, float] | None = option(
        None,
        valid=_are_biases,
        accepted=f"token ids with numbers from -100 to 100, at most {_MOST_BIASES}",
        unset="none",
    )
    """Added to the logits of tokens, before penalties."""
    allowed_token_ids: Sequence[int] | None = option(
        None,
        valid=lambda tokens: 0 < len(tokens) <= _MOST_ALLOWED and _are_token_ids(tokens),
        accepted=f"token ids, 1 to {_MOST_ALLOWED}",
        unset="all",
    )
    """No other tokens are drawn."""
    bad_words: Sequence[str | Sequence[int]] = option(
        (),
        valid=_are_words,
        accepted=f"texts or lists of token ids, none of them empty, at most {_MOST_WORDS} of "
        f"{_MOST_PARTS_OF_WORDS} characters or tokens together",
    )
    """Texts, or lists of token ids, that are not generated: their last tokens are not drawn behind
    the others. A text alone, and behind a space."""
    n: int = option(1, least=1)
    """Number of outputs, each drawn with a seed of its own."""
    seed: int | None = option(
        None,
        least=-(2**63),
        most=2**63 - 1,
        accepted="an integer of 64 bits",
        unset="of the engine's seed and the request's number",
    )
    """Of the random numbers that draw its tokens."""
    stop: str | Sequence[str] = option(
        (),
        valid=_are_stops,
        accepted="a string or several, none of them empty, at most "
        f"{_MOST_STOPS} of {_MOST_STOP_CHARACTERS} characters together",
    )
    """Strings that end the request as soon as they are in its text."""
    stop_token_ids: Sequence[int] = option(
        (),
        valid=lambda tokens: len(tokens) <= _MOST_STOP_TOKENS and _are_token_ids(tokens),
        accepted=f"token ids, at most {_MOST_STOP_TOKENS}",
    )
    """Tokens that end the request, besides the model's end token."""
    ignore_eos: bool = option(False)
    """The model's end token does not end the request."""
    logprobs: int | None = option(None, least=0, most=_MOST_TOP_LOG_PROBS, unset="none")
    """Log-probabilities of each token generated and of so many most likely ones. Before penalties,
    temperature and filters."""
    prompt_logprobs: int | None = option(None, least=0, most=_MOST_TOP_LOG_PROBS, unset="none")
    """The same for the tokens of the prompt. Needs an engine with ``prompt_logprobs`` and computes
    the whole prompt, whatever is cached."""
    routed_experts_prompt_start: int = option(0, least=0)
    """Routed experts of so many tokens at the prompt's beginning are left out."""
    indexer_topk_prompt_start: int = option(0, least=0)
    """Chosen keys of so many tokens at the prompt's beginning are left out."""
    truncate_prompt_tokens: int | None = option(None, least=1, also=(-1,), unset="all")
    """Only so many of the prompt's last tokens are read; -1: as many as leave room for
    ``max_tokens``."""
    include_stop_str_in_output: bool = option(False)
    """The text includes the string of ``stop`` that ended it."""
    skip_special_tokens: bool = option(True)
    """The text leaves out the tokenizer's special tokens."""
    structured_outputs: StructuredOutputsParams | None = option(
        None,
        valid=lambda given: isinstance(given, StructuredOutputsParams),
        accepted="StructuredOutputsParams",
        unset="none",
    )
    """Form of the text."""
    # Of requests whose text comes behind what is thought, by :meth:`derived`: finds in a prompt's
    # token ids which ones end that, and what it has found.
    find_reasoning_ends: ClassVar[Callable[[Sequence[int], Any], TokenSequences] | None] = None
    reasoning_ends: ClassVar[TokenSequences] = ()
    # Of structured outputs, once ``LLM`` has read them: it takes milliseconds for each output.
    grammar: ClassVar[str] = ""

    def __new__(cls, *values: Any, **_: Any) -> SamplingParams:
        """Refuse values without names, which are those of another order in vLLM.

        Raises:
            ValueError: If there are any.
        """
        if values:
            raise ValueError(
                f"{cls.__name__} takes its fields by their names, such as temperature=0, got "
                f"{values[0]!r:.100} without one"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in options_of(type(self)):
            object.__setattr__(self, name, _without_arrays(getattr(self, name)))
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        object.__setattr__(self, "stop", tuple(stop))
        words = [self.bad_words] if isinstance(self.bad_words, str) else self.bad_words or ()
        object.__setattr__(self, "bad_words", tuple(words))
        tokens = map(_without_arrays, self.stop_token_ids or ())
        object.__setattr__(self, "stop_token_ids", tuple(tokens))
        super().__post_init__()
        object.__setattr__(self, "top_k", max(self.top_k, 0))
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
    def has_bias(self) -> bool:
        """Whether some tokens are made more or less likely, or are not drawn."""
        return bool(self.logit_bias or self.bad_words) or self.allowed_token_ids is not None

    @property
    def changes_logits(self) -> bool:
        """Whether the sampler draws from other logits than the model's."""
        return self.has_penalties or self.has_bias

    @property
    def has_filters(self) -> bool:
        """Whether only some of the most likely tokens may be drawn."""
        return bool(self.top_k) or self.top_p < 1

    def replace(self, **changes) -> SamplingParams:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def derived(self, **fields: Any) -> SamplingParams:
        """A copy with fields that this package has found, which are not checked.

        It takes no longer with long lists, and tokens of texts may be more than users may give.
        """
        made = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made

    def clone(self) -> SamplingParams:
        """A copy, as vLLM's users make it."""
        return self.replace()

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
