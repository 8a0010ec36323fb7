"""Sampled continuations, and batches of them as tensors for the update."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from absorbed_mla.prefix_tree import PrefixTree


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


@dataclass(frozen=True)
class SharedPrefixBatch:
    """A pack of samples in which the prompt of samples that follow each other stands once.

    Attributes:
        tree: Of the pack.
        tokens: Of the pack, int64 [S].
        targets: The token after each of the samples' own tokens, -1 where it was not sampled; int64
            [N], all samples one after another, without the last token of each.
        sampled: bool [N].
        advantages: As of :class:`SampleBatch`, fp32 [N].
        log_probs: As of :class:`SampleBatch`, fp32 [N].
        samples: In their order.
    """

    tree: PrefixTree
    tokens: Tensor
    targets: Tensor
    sampled: Tensor
    advantages: Tensor
    log_probs: Tensor
    samples: Sequence[Sample]

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device) -> SharedPrefixBatch:
        """Pack samples."""
        lengths = torch.tensor([len(one.prompt) + len(one.tokens) - 1 for one in samples])
        rows = SampleBatch.of(samples, int(lengths.max()), device)
        real = rows.positions < lengths.to(device)[:, None]
        groups = [
            [*group] for _, group in itertools.groupby(samples, lambda sample: [*sample.prompt])
        ]
        tree = PrefixTree.of_groups(
            [(len(group[0].prompt), [len(one.tokens) - 1 for one in group]) for group in groups]
        )
        tokens = rows.tokens.new_zeros(tree.num_tokens)
        tokens[tree.expand().to(device)] = rows.tokens[real]
        targets = rows.targets.masked_fill(~rows.sampled, -1)
        fields = (targets, rows.sampled, rows.advantages, rows.log_probs)
        return cls(tree, tokens, *(field[real] for field in fields), samples)


Batch = SampleBatch | SharedPrefixBatch
