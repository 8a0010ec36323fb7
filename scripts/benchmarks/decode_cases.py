"""What decode.py measures: requests with so many keys, and whose attention."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from absorbed_mla.options import PAGED_ATTENTION_BACKENDS
from benchmarks.peers.decode import PEERS

OURS = tuple(f"ours, {name}" for name in PAGED_ATTENTION_BACKENDS if name != "auto")
_FP8 = ", fp8"
OVER_FP8 = tuple(f"ours, {name}{_FP8}" for name in ("hopper", "reference", "triton"))
IMPLEMENTATIONS = (*OURS, *OVER_FP8, *PEERS)
_PARITY = ", parity"
# Measured where they are named.
IN_PARITY = tuple(
    f"ours, {name}{cache}{_PARITY}" for name in ("hopper", "triton") for cache in ("", _FP8)
)
# The shortest of drawn requests.
_LEAST_KEYS = 64
# The reference takes too long at the sizes that are measured on a GPU.
FAST = tuple(name for name in IMPLEMENTATIONS if "reference" not in name)


def _spaced(draw: random.Random, batch: int, kv: int, new: int) -> list[int]:
    step = (kv - new) / batch
    lengths = [kv - int(number * step) for number in range(batch)]
    draw.shuffle(lengths)
    return lengths


def _uniform(draw: random.Random, batch: int, kv: int, new: int) -> list[int]:
    return [draw.randint(min(_LEAST_KEYS, kv), kv) for _ in range(batch)]


def _exponential(draw: random.Random, batch: int, kv: int, new: int) -> list[int]:
    drawn = [int(draw.expovariate(8 / kv)) for _ in range(batch)]
    return [min(max(keys, _LEAST_KEYS), kv) for keys in drawn]


def _one_long(draw: random.Random, batch: int, kv: int, new: int) -> list[int]:
    lengths = [kv] + [kv // 64] * (batch - 1)
    draw.shuffle(lengths)
    return lengths


# Numbers of keys of a batch, by name; see the description.
LENGTHS: dict[str, Callable[[random.Random, int, int, int], list[int]]] = {
    "equal": lambda draw, batch, kv, new: [kv] * batch,
    "spaced": _spaced,
    "uniform": _uniform,
    "exponential": _exponential,
    "one_long": _one_long,
}


@dataclass(frozen=True)
class Case:
    """Requests, and whose attention.

    Attributes:
        implementation: One of :data:`IMPLEMENTATIONS` or :data:`IN_PARITY`.
        heads: Of one rank.
        batch: Requests.
        kv: Keys of each request, or at most, new tokens included.
        query_length: New tokens of each.
        block_size: Tokens in a block of the cache.
        lengths: How many keys the requests have, one of :data:`LENGTHS`.
    """

    implementation: str
    heads: int
    batch: int
    kv: int
    query_length: int
    block_size: int
    lengths: str = "equal"

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
    def over_fp8(self) -> bool:
        """Whether the cache has FP8 rows."""
        return self.implementation.removesuffix(_PARITY).endswith(_FP8)

    @property
    def batch_invariant(self) -> bool:
        """Whether it runs in parity mode."""
        return self.implementation.endswith(_PARITY)

    @property
    def backend(self) -> str:
        """The name of ours among the backends."""
        name = self.implementation.removeprefix("ours, ").removesuffix(_PARITY)
        return name.removesuffix(_FP8)

    @property
    def keys(self) -> str:
        """``kv`` for people; ``"spaced<=8192"`` where not all requests have so many."""
        return str(self.kv) if self.lengths == "equal" else f"{self.lengths}<={self.kv}"

    @property
    def kv_lengths(self) -> list[int]:
        """Keys of each request, new tokens included; the same for the same case."""
        draw = random.Random(self.batch)
        lengths = LENGTHS[self.lengths](draw, self.batch, self.kv, self.query_length)
        return [max(keys, self.query_length) for keys in lengths]

    def flops(self, content: int, rope: int) -> float:
        """Of scores and values; a token sees its request's keys up to its own."""
        new = self.query_length
        pairs = sum(self.kv_lengths) * new - self.batch * (new * (new - 1) / 2)
        return self.heads * pairs * 2 * (2 * content + rope)

    def latent_bytes(self, content: int, rope: int, itemsize: int) -> int:
        """Of all keys, read once."""
        row = (content + rope) * itemsize
        if self.over_fp8:
            from absorbed_mla.fp8_latents import Fp8Latents

            row = Fp8Latents(content, rope).row_bytes
        return sum(self.kv_lengths) * row
