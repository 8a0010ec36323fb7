"""Sampling parameters of a request: how the next token is chosen, and when the request ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

# Command lines show these parameters before anything that takes seconds to import.
if TYPE_CHECKING:
    from megatron.core.inference.sampling_params import SamplingParams as HostSamplingParams

# Megatron's termination_id for a request that no token ends.
_NO_STOP_TOKEN = -1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Attributes:
        num_tokens: Maximum number of tokens to generate.
        temperature: Divides the logits.
        top_k: Sample from the k most likely tokens only; 1 is greedy, 0 means all tokens.
        top_p: Sample from the most likely tokens that together have this probability; 0 means all.
        stop_token: Ends the request and is its last token; None if no token does.
        log_probs: Whether to return the log-probability of every generated token, before
            temperature, ``top_k`` and ``top_p``.

    Raises:
        ValueError: On construction, naming the field, what it got and what it accepts.
    """

    num_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    stop_token: int | None = None
    log_probs: bool = False

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {self.num_tokens}")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be above 0, got {self.temperature} (top_k=1 is greedy)"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {self.top_k}")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p must be from 0 to 1, got {self.top_p}")
        if self.top_k and self.top_p:
            raise ValueError(
                f"top_k and top_p exclude each other, got {self.top_k} and {self.top_p}"
            )

    def to_host(self, max_new_tokens: int) -> HostSamplingParams:
        """Megatron's parameters, for a request with room for ``max_new_tokens`` more tokens."""
        from megatron.core.inference.sampling_params import SamplingParams as HostSamplingParams

        return HostSamplingParams(
            num_tokens_to_generate=min(self.num_tokens, max_new_tokens),
            temperature=float(self.temperature),
            top_k=self.top_k,
            top_p=float(self.top_p),
            termination_id=_NO_STOP_TOKEN if self.stop_token is None else self.stop_token,
            return_log_probs=self.log_probs,
            skip_prompt_log_probs=True,
        )
