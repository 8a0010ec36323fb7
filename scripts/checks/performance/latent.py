"""Attention over the latent beside FlashAttention-3: results of latent_attention.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.kit.tables import tokens_text
from checks.performance.row import Row, by_input, recorded

_PEER = "FlashAttention-3"


def latent_rows(path: Path) -> Iterator[Row]:
    """Forward, of calls that are queued and of calls that the host waits for."""
    inputs = by_input(
        recorded(path),
        lambda row: (row.case.work, row.case.heads, row.case.tokens),
        lambda row: row.case.implementation,
    )
    for found in inputs:
        if not {"ours, hopper", _PEER} <= found.keys():
            continue
        ours, theirs = found["ours, hopper"], found[_PEER]
        case = ours.case
        work = f"{case.work}, {case.heads} heads, {tokens_text(case.tokens)}"
        yield Row(f"{work}, queued", _PEER, ours.times, theirs.times, vars(case))
        yield Row(f"{work}, called", _PEER, ours.called, theirs.called, vars(case))
