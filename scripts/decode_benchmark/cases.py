"""What is measured."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

# All of paged_attention_backend.
OURS = ("ours, hopper", "ours, triton", "ours, flash_mla", "ours, reference")
PEERS = ("FlashMLA", "FlashInfer", "vLLM, FlashAttention-3", "vLLM, Triton")
IMPLEMENTATIONS = (*OURS, *PEERS)


@dataclass(frozen=True)
class DecodeCase:
    """Requests, and who attends.

    Attributes:
        implementation: One of ``IMPLEMENTATIONS``.
        heads: Of one rank.
        batch: Requests.
        kv: Keys of each, or of the longest; the new tokens' included.
        query_length: New tokens of each.
        block_size: Tokens in a block of the cache.
        uneven: Whether requests have any number of keys up to ``kv``.
    """

    implementation: str
    heads: int
    batch: int
    kv: int
    query_length: int
    block_size: int
    uneven: bool = False

    def __str__(self) -> str:
        return (
            f"{self.implementation} n={self.heads} b={self.batch} kv={self.keys} "
            f"s_q={self.query_length} block={self.block_size}"
        )

    @property
    def input(self) -> tuple[int | str, ...]:
        """What cases that are compared have in common."""
        return self.heads, self.batch, self.keys, self.query_length, self.block_size

    @property
    def keys(self) -> str:
        """``kv`` as people read it."""
        return f"<={self.kv}" if self.uneven else str(self.kv)

    @property
    def kv_lengths(self) -> list[int]:
        """Keys of each request: evenly spread and in any order where they are uneven."""
        if not self.uneven:
            return [self.kv] * self.batch
        step = (self.kv - self.query_length) / self.batch
        lengths = [self.kv - int(number * step) for number in range(self.batch)]
        random.Random(self.batch).shuffle(lengths)
        return lengths

    def flops(self, content: int, rope: int) -> float:
        """Of scores and values; a token sees its request's keys up to its own."""
        new = self.query_length
        pairs = sum(self.kv_lengths) * new - self.batch * (new * (new - 1) / 2)
        return self.heads * pairs * 2 * (2 * content + rope)

    def latent_bytes(self, content: int, rope: int, itemsize: int) -> int:
        """Of all keys, read once."""
        return sum(self.kv_lengths) * (content + rope) * itemsize

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)
