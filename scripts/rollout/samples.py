"""Sampled continuations, and batches of them as tensors for the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One sampled continuation.

    Attributes:
        prompt: Token ids.
        tokens: Sampled token ids, at least one.
        log_probs: Of ``tokens``, from the rollout.
        reward: Of the whole sample.
        advantage: Reward relative to the other samples of the same prompt.
        routed_experts: As ``CompletionOutput`` has them, like the next; None without ``--replay``.
        indexer_topk: Of sparse attention.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    log_probs: Sequence[float]
    reward: float
    advantage: float
    routed_experts: Any = None
    indexer_topk: Any = None


@dataclass(frozen=True)
class SampleBatch:
    """A batch of samples, padded at the right.

    Attributes:
        tokens: Input of the model, int64 [b, s].
        positions: int64 [b, s].
        targets: The token after each, int64 [b, s].
        sampled: True where the target was sampled, not in the prompt or padding; bool [b, s].
        advantages: Of the sample, fp32 [b, s]; 0 where the target was not sampled.
        log_probs: Of the target in the rollout, fp32 [b, s]; 0 where it was not sampled.
        samples: In the rows.
    """

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    sampled: Tensor
    advantages: Tensor
    log_probs: Tensor
    samples: Sequence[Sample]

    @classmethod
    def of(cls, samples: Sequence[Sample], length: int, device: torch.device) -> SampleBatch:
        """Batch samples of at most ``length`` + 1 tokens, prompt included."""
        shape = len(samples), length
        tokens, targets = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        sampled = torch.zeros(shape, dtype=torch.bool)
        advantages, log_probs = torch.zeros(shape), torch.zeros(shape)
        for row, sample in enumerate(samples):
            text = torch.tensor([*sample.prompt, *sample.tokens])
            tokens[row, : len(text) - 1], targets[row, : len(text) - 1] = text[:-1], text[1:]
            continuation = slice(len(sample.prompt) - 1, len(text) - 1)
            sampled[row, continuation] = True
            advantages[row, continuation] = sample.advantage
            log_probs[row, continuation] = torch.tensor(sample.log_probs)
        positions = torch.arange(length).expand(shape)
        fields = (tokens, positions, targets, sampled, advantages, log_probs)
        return cls(*(field.to(device) for field in fields), samples)
