"""DeepSeek Sparse Attention: results of dsa.py, dsa_decode.py and dsa_layer.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.dsa import DSAReport
from benchmarks.kit.report import Times
from benchmarks.kit.tables import tokens_text
from checks.performance.row import Row, by_input, recorded, without_errors

_DENSE = "our dense decode"
# Works of dsa_layer.py, as the page calls them.
_LAYERS = {
    "megatron": "Megatron, plain PyTorch",
    "megatron-tilelang": "Megatron, TileLang",
    "megatron-cudnn": "Megatron, cuDNN and FlashMLA",
    "slot": "Megatron's DSAttention in our layer",
    "dense": "our dense layer",
}


def sparse_rows(path: Path) -> Iterator[Row]:
    """Forward and backward over chosen keys, beside FlashMLA and TileLang."""
    inputs = by_input(
        DSAReport.read(path).measured,
        lambda row: row.case.input,
        lambda row: row.case.implementation,
    )
    for found in inputs:
        for peer in ("FlashMLA", "TileLang"):
            if "hopper" in found and peer in found:
                case = found["hopper"].case
                keys = "shared" if case.shared else "random"
                work = f"{case.work}, {case.heads} heads, {tokens_text(case.kv)}, {keys} choice"
                yield Row(work, peer, found["hopper"].times, found[peer].times, vars(case))


def sparse_decode_rows(path: Path) -> Iterator[Row]:
    """Choice and attention beside dense decode; attention alone beside FlashMLA's.

    FlashMLA does not choose: the time of our attention alone is recorded without its spread.
    """
    inputs = by_input(
        recorded(path),
        lambda row: (row.case.heads, row.case.batch, row.case.kv),
        lambda row: row.case.implementation,
    )
    for found in inputs:
        if "sparse, hopper" not in found:
            continue
        ours = found["sparse, hopper"]
        case = ours.case
        sizes = f"{case.batch} requests of {tokens_text(case.kv)}, {case.heads} heads"
        if "dense, hopper" in found:
            dense = found["dense, hopper"].times
            yield Row(f"decode, {sizes}", _DENSE, ours.times, dense, vars(case))
        if "FlashMLA" in found:
            attend = Times.of([ours.more.attend_us / 1e6])
            work = f"decode, attention alone, {sizes}"
            yield Row(work, "FlashMLA", attend, found["FlashMLA"].times, vars(case))


def sparse_layer_rows(path: Path) -> Iterator[Row]:
    """A step of our sparse layer beside each other layer."""
    for row in recorded(path):
        steps = {work.name: work.step for work in without_errors(row.works)}
        for name, called in _LAYERS.items():
            if "sparse" in steps and name in steps:
                work = f"layer, {row.case.heads} heads, {tokens_text(row.case.tokens)}"
                facts = {**vars(row.case), "work": "layer"}
                yield Row(work, called, steps["sparse"], steps[name], facts)
