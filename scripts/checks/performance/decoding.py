"""Attention of decode over a paged cache: decode.py's results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.decode import DecodeReport
from benchmarks.kit.tables import tokens_text
from checks.performance.row import Row, by_input

OURS = "ours, hopper"
PEERS = ("FlashMLA", "vLLM, FlashAttention-3")


def decode_rows(path: Path) -> Iterator[Row]:
    """Ours beside both libraries that serve DeepSeek's models."""
    inputs = by_input(
        DecodeReport.read(path).measured,
        lambda row: row.case.input,
        lambda row: row.case.implementation,
    )
    for found in inputs:
        for peer in PEERS:
            if OURS in found and peer in found:
                case = found[OURS].case
                name = peer.removeprefix("vLLM, ")
                yield Row(_work(case), name, found[OURS].times, found[peer].times, vars(case))


def _work(case) -> str:
    requests = "request" if case.batch == 1 else "requests"
    keys = tokens_text(case.kv)
    lengths = f"of {keys}" if case.lengths == "equal" else f"up to {keys}"
    new = "" if case.query_length == 1 else f", {case.query_length} new tokens each"
    block = "" if case.block_size == 64 else f", blocks of {case.block_size}"
    spread = "" if case.lengths == "equal" else f", {case.lengths.replace('_', ' ')}"
    return f"{case.batch} {requests} {lengths}{spread}, {case.heads} heads{new}{block}"
