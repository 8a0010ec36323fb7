"""What is measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

# All of paged_attention_backend.
OURS = ("ours, hopper", "ours, triton", "ours, flash_mla", "ours, reference")
PEERS = ("FlashMLA", "FlashInfer", "vLLM, FlashAttention-3", "vLLM, Triton")
IMPLEMENTATIONS = (*OURS, *PEERS)


@dataclass(frozen=True)
class DecodeCase:
    """Equal requests, and who attends.

    Attributes:
        implementation: One of ``IMPLEMENTATIONS``.
        heads: Of one rank.
        batch: Requests.
        kv: Keys of each, the new tokens' included.
        query_length: New tokens of each.
        block_size: Tokens in a block of the cache.
    """

    implementation: str
    heads: int
    batch: int
    kv: int
    query_length: int
    block_size: int

    def __str__(self) -> str:
        return (
            f"{self.implementation} n={self.heads} b={self.batch} kv={self.kv} "
            f"s_q={self.query_length} block={self.block_size}"
        )

    @property
    def input(self) -> tuple[int, ...]:
        """What cases that are compared have in common."""
        return self.heads, self.batch, self.kv, self.query_length, self.block_size

    def flops(self, content: int, rope: int) -> float:
        """Of scores and values; a token sees its request's keys up to its own."""
        new = self.query_length
        pairs = self.batch * (self.kv * new - new * (new - 1) / 2)
        return self.heads * pairs * 2 * (2 * content + rope)

    def latent_bytes(self, content: int, rope: int, itemsize: int) -> int:
        """Of all keys, read once."""
        return self.batch * self.kv * (content + rope) * itemsize

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)
