"""Requests of engine.py, and whether they get the tokens that each has alone."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

# Different beginnings that prompts share: like the instructions of several applications.
PREFIXES = 4


@dataclass(frozen=True)
class Request:
    """A greedy request."""

    prompt: Sequence[int]  # token ids
    num_tokens: int  # to generate


class Prompts:
    """Prompts of mixed lengths, every other one with a beginning that others share.

    The logarithm of a length is uniform, from 4 to ``--longest-prompt``.

    Args:
        args: Their sizes and the seed.
        vocab_size: Of the token ids.
    """

    def __init__(self, args: argparse.Namespace, vocab_size: int) -> None:
        self.draw = random.Random(args.seed)
        self._longest, self._vocab_size = args.longest_prompt, vocab_size
        self._prefixes = [self.tokens(args.shared_prefix) for _ in range(PREFIXES)]

    def tokens(self, number: int) -> list[int]:
        """So many."""
        return [self.draw.randrange(self._vocab_size) for _ in range(number)]

    def sizes(self, number: int) -> tuple[list[int], int]:
        """The beginning of a prompt, and how many tokens of its own follow."""
        prefix = self.draw.choice(self._prefixes) if number % 2 else []
        own = round(math.exp(self.draw.uniform(math.log(4), math.log(self._longest))))
        return prefix, min(own, self._longest - len(prefix))


def workload(args: argparse.Namespace) -> list[Request]:
    """Requests, the same for every case.

    As many tokens as asked for are generated: there is no stop token.
    """
    prompts, requests = Prompts(args, args.vocab_size), []
    for number in range(args.requests):
        prefix, own = prompts.sizes(number)
        prompt = [*prefix, *prompts.tokens(own)]
        requests.append(Request(prompt, prompts.draw.randint(1, args.longest_output)))
    return requests


def longest(requests: Sequence[Any]) -> int:
    """Tokens of the longest request, with what it generates."""
    return max(len(request.prompt) + request.num_tokens for request in requests)


def scarce_blocks(requests: Sequence[Any], max_requests: int) -> int:
    """Two fifths of what ``max_requests`` average requests need at their ends.

    So few, because they share blocks of their prefixes. Enough for the longest one by itself, which
    the host otherwise refuses.
    """
    needed = [_blocks(len(request.prompt) + request.num_tokens) for request in requests]
    together = min(max_requests, len(requests)) * sum(needed) / len(needed)
    return max(round(0.4 * together), 2 * max(needed))


def _blocks(tokens: int) -> int:
    from absorbed_mla.serving.scheduler.block_pool import BLOCK_SIZE

    return -(-tokens // BLOCK_SIZE)


@dataclass
class Comparison:
    """Of all requests, together and alone."""

    equal: int = 0  # requests with the same tokens
    ties: int = 0  # requests whose first different tokens are both within the tie of the likeliest
    different: int = 0  # the other requests
    # Furthest that a chosen token was from the likeliest, in log-probability.
    worst_gap: float = 0.0
    examples: tuple[int, ...] = ()  # numbers of some of the different ones


def compare(
    model: GPTModel,
    requests: Sequence[Request],
    together: Sequence[Sequence[int]],
    alone: Sequence[Sequence[int]],
    tie: float,
) -> Comparison:
    """Compare the tokens of every request.

    Args:
        model: That generated both.
        requests: Their prompts.
        together: Tokens by request.
        alone: Likewise.
        tie: Log-probability by which a chosen token may be below the likeliest.
    """
    found = Comparison()
    for number, (request, batched, single) in enumerate(zip(requests, together, alone)):
        if list(batched) == list(single):
            found.equal += 1
            continue
        gap = _gap(model, request, batched, single)
        found.worst_gap = max(found.worst_gap, gap)
        if gap <= tie:
            found.ties += 1
        else:
            found.different += 1
            found.examples = (*found.examples, number)[:8]
    return found


def _gap(model: GPTModel, request: Request, batched: Sequence[int], single: Sequence[int]) -> float:
    """How far the less likely of the first two different tokens is below the likeliest."""
    import torch
    from megatron.core.inference.utils import InferenceMode

    if len(batched) != len(single):
        return float("inf")
    at = next(i for i, (one, other) in enumerate(zip(batched, single)) if one != other)
    device = next(model.parameters()).device
    ids = torch.tensor([[*request.prompt, *batched[:at]]], device=device)
    positions = torch.arange(ids.shape[1], device=device)[None]
    was_active = InferenceMode.is_active()
    # A forward without a context is no inference to Megatron.
    InferenceMode.unset_active()
    with torch.inference_mode():
        scores = model(ids, positions, None)[0, -1].float().log_softmax(-1)
    if was_active:
        InferenceMode.set_active()
    return float(scores.max() - scores[[batched[at], single[at]]].min())
