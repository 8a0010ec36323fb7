"""The requests, and a cache that is too small for them."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from absorbed_mla.generation.blocks import BLOCK_SIZE

# Different beginnings that prompts share: like the instructions of several applications.
_PREFIXES = 4


@dataclass(frozen=True)
class Request:
    """A greedy request.

    Attributes:
        prompt: Token ids.
        num_tokens: To generate.
    """

    prompt: Sequence[int]
    num_tokens: int


def workload(args: argparse.Namespace) -> list[Request]:
    """Requests of mixed lengths, the same for every case.

    The logarithm of a prompt's length is uniform, from 4 to ``--longest-prompt``; every other
    prompt begins with one of four prefixes. As many tokens as asked for are generated: there is no
    stop token.
    """
    rng = random.Random(args.seed)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(args.vocab_size) for _ in range(number)]

    prefixes = [tokens(args.shared_prefix) for _ in range(_PREFIXES)]
    requests = []
    for number in range(args.requests):
        prefix = rng.choice(prefixes) if number % 2 else []
        own = round(math.exp(rng.uniform(math.log(4), math.log(args.longest_prompt))))
        own = min(own, args.longest_prompt - len(prefix))
        requests.append(Request([*prefix, *tokens(own)], rng.randint(1, args.longest_output)))
    return requests


def longest(requests: Sequence[Request]) -> int:
    """Tokens of the longest request, with what it generates."""
    return max(len(request.prompt) + request.num_tokens for request in requests)


def scarce_blocks(requests: Sequence[Request], max_requests: int) -> int:
    """Three fifths of what ``max_requests`` average requests need at their ends.

    Enough for the longest one by itself, which the host otherwise refuses.
    """
    needed = [_blocks(len(request.prompt) + request.num_tokens) for request in requests]
    together = min(max_requests, len(requests)) * sum(needed) / len(needed)
    return max(round(0.6 * together), 2 * max(needed))


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)
