"""Commands of ``LLM`` to the engines of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from absorbed_mla.lora.request import LoRARequest
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.structured_output.vocabulary import TokenVocabulary


@dataclass(frozen=True)
class Add:
    """Command: queue a request. Requests are numbered from 0 in the order of these commands."""

    prompt: Sequence[int]
    params: SamplingParams
    cache_salt: str | None = None
    lora_request: LoRARequest | None = None
    priority: int = 0


@dataclass(frozen=True)
class Abort:
    """Command: end a request."""

    number: int


@dataclass(frozen=True)
class SetVocabulary:
    """Command: know the texts of tokens, as requests with structured outputs need them."""

    vocabulary: TokenVocabulary


Command = Add | Abort | SetVocabulary
