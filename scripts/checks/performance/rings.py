"""Layers under context parallelism: context_parallel.py's results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.context_parallel import CPReport
from benchmarks.context_parallel import Row as CPRow
from benchmarks.kit.report import Times
from checks.performance.row import Row, by_input, layer_work

RING = "Megatron + TE's ring"


def ring_rows(path: Path) -> Iterator[Row]:
    """A step beside Megatron's, whose attention is TransformerEngine's ring.

    Where only ours was measured recomputed, it is compared with theirs that is not: ours then
    computes more, and the row says so.
    """
    inputs = by_input(
        CPReport.read(path).measured,
        lambda row: row.compared[:-1],
        lambda row: _name(row.case.implementation, row.case.cp_comm_type, row.case.recompute),
    )
    for found in inputs:
        for row in found.values():
            if row.case.implementation == "ours":
                recompute = row.case.recompute
                like = found.get(_name("megatron", "p2p", recompute))
                less = found.get(_name("megatron", "p2p", "none"))
                if like:
                    yield _row(row, like, "" if recompute == "none" else ", recomputed")
                elif less:
                    yield _row(row, less, ", recomputed by ours only")


def _name(*parts: str) -> str:
    return " ".join(parts)


def _row(ours: CPRow, theirs: CPRow, recomputed: str) -> Row:
    case = ours.case
    way = "" if case.cp_comm_type == "all_gather" else f", ours {case.cp_comm_type}"
    work = layer_work(case.heads, case.tokens, case.layout)
    return Row(
        f"CP {ours.cp_size}, {work}{recomputed}{way}",
        RING,
        Times.of(ours.step_seconds),
        Times.of(theirs.step_seconds),
        {**vars(case), "cp_size": ours.cp_size},
    )
