"""How the next token is chosen, and when a request ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.inference.sampling_params import SamplingParams

# Megatron's -1: no token ends the request.
_NO_STOP = -1


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Of one request.

    Attributes:
        num_tokens: To generate, unless ``stop_token`` or the end of the context comes before.
        temperature: Divides the logits.
        top_k: Only so many of the likeliest tokens; 1 is greedy, 0 leaves all.
        top_p: Only the likeliest tokens that make up this much probability; 0 leaves all.
        stop_token: Ends the request and is its last token; None: no token does.
        log_probs: Whether to record the log-probabilities of the generated tokens, before
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

    def to_host(self, num_tokens: int) -> SamplingParams:
        """Megatron's parameters of a request that has room for ``num_tokens`` new tokens."""
        from megatron.core.inference.sampling_params import SamplingParams

        return SamplingParams(
            num_tokens_to_generate=num_tokens,
            temperature=float(self.temperature),
            top_k=self.top_k,
            top_p=float(self.top_p),
            termination_id=_NO_STOP if self.stop_token is None else self.stop_token,
            return_log_probs=self.log_probs,
            skip_prompt_log_probs=True,
        )
