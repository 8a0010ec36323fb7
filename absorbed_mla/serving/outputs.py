"""What ``LLM`` returns, in the shape that vLLM's users know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
        logprob: Before penalties, temperature and filters.
        rank: 1 for the most likely token; None for the generated token if it is not among the
            most likely ones that were asked for.
        decoded_token: Text of the token alone, with U+FFFD for part of a character; None without
            a tokenizer.
        token_bytes: UTF-8 that the token adds to a text; those of all tokens join to it. None
            without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    token_bytes: bytes | None = None


# The token of a position and the most likely ones there, by token id.
PositionLogprobs = dict[int, Logprob]


@dataclass
class CompletionOutput:
    """One generated text.

    Attributes:
        index: From 0 to ``SamplingParams.n`` - 1.
        text: So far; empty without a tokenizer.
        token_ids: So far, the token that ended the text included.
        cumulative_logprob: Sum over ``token_ids``; None unless ``logprobs`` asked for them.
        logprobs: One entry per token; None unless asked for.
        finish_reason: ``"stop"`` (end token, stop token or stop string), ``"length"``
            (``max_tokens`` or the end of the context), ``"abort"``, ``"error"`` (the model failed;
            what came before is kept), or None while it runs.
        stop_reason: The string of ``stop``, or the token of ``stop_token_ids``, that ended it; None
            for the model's own end token.
        error: What failed, after ``"error"``.
        routed_experts: NumPy's array [tokens, layers with experts, K], of the prompt from
            ``routed_experts_prompt_start`` on and of all generated tokens but the last, which the
            model has not read: numbers of experts, uint8, or uint16 for more than 256. None before
            the end, after an abort, and unless ``enable_return_routed_experts`` asks for it.
        indexer_topk: Likewise, with ``enable_return_indexer_topk``, of the keys that layers with an
            indexer have chosen: int32 [tokens, layers, topk], positions in prompt and output,
            ascending, then -1.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    routed_experts: Any = field(default=None, compare=False)
    indexer_topk: Any = field(default=None, compare=False)

    @property
    def token_logprobs(self) -> list[float] | None:
        """Log-probability of each generated token; None unless ``logprobs`` asked for them."""
        if self.logprobs is None:
            return None
        return [place[token].logprob for token, place in zip(self.token_ids, self.logprobs)]


@dataclass
class RequestOutput:
    """The outputs of one prompt.

    Attributes:
        request_id: As ``add_request`` returned it.
        prompt: Its text; None if it was given as token ids.
        prompt_token_ids: Token ids of the prompt.
        outputs: ``SamplingParams.n`` of them.
        finished: Whether all outputs have ended.
        prompt_logprobs: One entry per token of the prompt, None for the first; None as a whole
            unless ``prompt_logprobs`` asked for them, and before the first output has ended.
        num_cached_tokens: Tokens of the prompt in blocks that the prefix cache had; None before the
            first token.
        first_scheduled_time: When its first step began, in seconds since the epoch; likewise.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int | None = None
    first_scheduled_time: float | None = None
