"""What is measured, and what it costs by counting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SUITES = ("prefill", "offload")


@dataclass(frozen=True)
class Case:
    """One step over a cache.

    Attributes:
        suite: ``"prefill"``: many new tokens over a context, beside the bare attention of the
            expanded form. ``"offload"``: decoding with part of the context in host memory, beside
            all of it on the device.
        heads: Of the rank.
        batch: Requests.
        queries: New tokens of each.
        context: Cached tokens of each.
        resident: Positions that stay on the device; None for all.
    """

    suite: str
    heads: int
    batch: int
    queries: int
    context: int
    resident: int | None = None

    @property
    def keys(self) -> int:
        """Keys of a request."""
        return self.context + self.queries

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, of all requests and one head."""
        return self.batch * (self.queries * self.keys - self.queries * (self.queries - 1) // 2)

    def __str__(self) -> str:
        size = f"n={self.heads} b={self.batch} q={self.queries} context={self.context}"
        return f"{self.suite} {size}" + (f" resident={self.resident}" if self.resident else "")


def cases(args) -> Iterator[Case]:
    """What the command line asks for."""
    for heads in args.heads:
        if "prefill" in args.suites:
            for context in args.contexts:
                for queries in args.queries:
                    yield Case("prefill", heads, 1, queries, context)
        if "offload" in args.suites:
            for batch in args.batches:
                for context in args.contexts:
                    resident = max(1, (context + 1) // args.budget_ratio)
                    yield Case("offload", heads, batch, 1, context, resident)


def flops(case: Case, dims: dict[str, int]) -> dict[str, int]:
    """Floating-point operations of the attention in the expanded form, and of the expansion."""
    nope, rope, v = (dims[f"{name}-head-dim"] for name in ("qk", "qk-pos-emb", "v"))
    products = 2 * case.batch * case.keys * case.heads * dims["kv-lora-rank"] * (nope + v)
    return {
        "attention": 2 * case.heads * case.pairs * (nope + rope + v),
        "expansion": products,
    }


def offloaded_bytes(case: Case, dims: dict[str, int], itemsize: int) -> int:
    """What one step brings from host memory."""
    width = dims["kv-lora-rank"] + dims["qk-pos-emb-head-dim"]
    behind = 0 if case.resident is None else max(0, case.keys - case.resident)
    return case.batch * behind * width * itemsize
