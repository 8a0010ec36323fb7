"""Whole attention layers on one GPU, and their attention alone: attention.py's results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.attention import AttentionReport
from benchmarks.attention import Row as AttentionRow
from benchmarks.kit.tables import tokens_text
from checks.performance.row import MEGATRON, Row, by_input, layer_work

FLASH_4, PYTORCH = "FlashAttention-4", "PyTorch, memory-efficient"
# Ours and the peers of each form, by their names in the file.
_CORE = {
    "expanded": (
        "ours, flash_attention_4",
        {"FlashAttention-4": FLASH_4, "TransformerEngine": "TE with cuDNN"},
    ),
    "absorbed": ("ours, hopper", {"torch, efficient": PYTORCH}),
}
_WIDTHS = {"expanded": "192/128", "absorbed": "576/512"}


def layer_rows(path: Path) -> Iterator[Row]:
    """A step of a layer beside Megatron's with the same recomputation and precision."""
    report = AttentionReport.read(path)
    for row in report.of("layer"):
        case, peer = row.case, report.peer(row)
        if case.implementation != "ours" or peer is None or not (row.step and peer.step):
            continue
        recompute = ", recomputed" if case.recompute else ""
        precision = f", {case.precision}" if case.precision != "bf16" else ""
        work = layer_work(case.heads, case.tokens, case.layout) + recompute + precision
        yield Row(work, MEGATRON, row.step, peer.step, vars(case))


def fp8_rows(path: Path) -> Iterator[Row]:
    """The layers of :func:`layer_rows` whose products are in FP8."""
    return (row for row in layer_rows(path) if row.facts["precision"] != "bf16")


def core_rows(path: Path) -> Iterator[Row]:
    """Forward and backward of the attention alone; some have no backward."""
    inputs = by_input(
        AttentionReport.read(path).of("core"),
        lambda row: (row.case.form, row.case.heads, row.case.tokens),
        lambda row: row.case.implementation,
    )
    for found in inputs:
        case = next(iter(found.values())).case
        ours, peers = _CORE[case.form]
        for name, called in peers.items():
            if ours in found and name in found:
                yield from _both_ways(found[ours], found[name], called)


def _both_ways(ours: AttentionRow, theirs: AttentionRow, called: str) -> Iterator[Row]:
    case = ours.case
    for way in ("forward", "backward"):
        own, other = getattr(ours, way), getattr(theirs, way)
        if own and other:
            work = f"{_WIDTHS[case.form]} {way}, {case.heads} heads, {tokens_text(case.tokens)}"
            yield Row(work, called, own, other, {**vars(case), "peer": called})
