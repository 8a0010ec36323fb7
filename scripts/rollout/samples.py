"""Sampled texts, and as tensors what the update needs of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One sampled continuation.

    Attributes:
        prompt: Token ids.
        tokens: Sampled, at least one.
        log_probs: Of these, as the rollout had them.
        reward: Of the text.
        advantage: Of the text over others of the same prompt.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    log_probs: Sequence[float]
    reward: float
    advantage: float


@dataclass(frozen=True)
class SampleBatch:
    """Samples side by side, padded at their ends.

    Attributes:
        tokens: Input of the model, int64 [b, s].
        positions: int64 [b, s].
        targets: The token after each, int64 [b, s].
        sampled: Whether the target was sampled (not the prompt's, not padding), bool [b, s].
        advantages: Of the target's sample, fp32 [b, s].
        log_probs: Of the target in the rollout, fp32 [b, s]; 0 where it was not sampled.
    """

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    sampled: Tensor
    advantages: Tensor
    log_probs: Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], length: int, device: torch.device) -> SampleBatch:
        """Samples, of which none has more than ``length`` + 1 tokens with its prompt."""
        shape = len(samples), length
        tokens, targets = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        sampled = torch.zeros(shape, dtype=torch.bool)
        advantages, log_probs = torch.zeros(shape), torch.zeros(shape)
        for row, sample in enumerate(samples):
            text = torch.tensor([*sample.prompt, *sample.tokens])
            tokens[row, : len(text) - 1], targets[row, : len(text) - 1] = text[:-1], text[1:]
            mine = slice(len(sample.prompt) - 1, len(text) - 1)
            sampled[row, mine] = True
            advantages[row, mine] = sample.advantage
            log_probs[row, mine] = torch.tensor(sample.log_probs)
        positions = torch.arange(length).expand(shape)
        fields = (tokens, positions, targets, sampled, advantages, log_probs)
        return cls(*(field.to(device) for field in fields))
