"""A step that the device has been given, and what it returns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from megatron.core.inference.batch_dimensions_utils import InferenceBatchDimensions
from torch import Tensor


class Landing:
    """Pinned memory that a step's tokens come to; of two steps in a row, each has its own.

    Args:
        max_rows: Of a step.
    """

    def __init__(self, max_rows: int) -> None:
        self._tokens = torch.zeros(max_rows, dtype=torch.int64, pin_memory=True)
        self._log_probs = torch.zeros(max_rows, dtype=torch.float32, pin_memory=True)
        self._arrived = torch.cuda.Event()
        self._count, self._scored = 0, False

    def expect(self, tokens: Tensor, log_probs: Tensor | None) -> None:
        """Queue the copies of these tensors [rows]; they have arrived with all that is before."""
        self._count, self._scored = len(tokens), log_probs is not None
        self._tokens[: self._count].copy_(tokens, non_blocking=True)
        if log_probs is not None:
            self._log_probs[: self._count].copy_(log_probs, non_blocking=True)
        self._arrived.record()

    def wait(self) -> None:
        """Return when the tensors have arrived."""
        self._arrived.synchronize()

    def tokens(self) -> list[int]:
        """By row."""
        return self._tokens[: self._count].tolist()

    def log_probs(self) -> list[float] | None:
        """By row; None: the step computed none."""
        return self._log_probs[: self._count].tolist() if self._scored else None


@dataclass(frozen=True)
class Flight:
    """A step on the device.

    Attributes:
        numbers: Of the requests, by row.
        at_their_ends: Rows whose requests are as long as they may be with the token of this step.
        stop_tokens: By row, Megatron's token that ends the request.
        scores: By row, whether the request wants the token's log-probability.
        sizes: Of the step, without padding.
        padded: Whether it has the size of a CUDA graph.
        landing: Where its tokens come to.
    """

    numbers: Sequence[int]
    at_their_ends: set[int]
    stop_tokens: Sequence[int]
    scores: Sequence[bool]
    sizes: InferenceBatchDimensions
    padded: bool
    landing: Landing

    @property
    def reads(self) -> bool:
        """Whether it reads prompts."""
        return self.sizes.prefill_req_count > 0

    def log_probs(self, *, without: Collection[int]) -> list[float] | None:
        """By row, if a request wants its own that is not in one of the rows ``without``."""
        wanted = any(wants and row not in without for row, wants in enumerate(self.scores))
        return self.landing.log_probs() if wanted else None

    def rows_of(self, numbers: Collection[int]) -> set[int]:
        """Rows of those of these requests that take part."""
        if not numbers:
            return set()
        return {row for row, number in enumerate(self.numbers) if number in numbers}
