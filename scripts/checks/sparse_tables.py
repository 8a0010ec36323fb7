"""Tables of the sparse kernels from the results under docs/measurements/dsa."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.dsa import DSAReport
from benchmarks.kit.tables import markdown_table, tokens_text
from checks.performance.row import by_input, recorded, without_errors

_INPUT = ["heads", "keys", "choice"]
_TILELANG = "megatron-tilelang"


def forward_table(docs: Path) -> str:
    """TFLOP/s of every implementation."""
    names = ("hopper", "triton", "FlashMLA", "TileLang")
    lines = [
        [*_of_input(found[names[0]]), *(f"{_tflops(found[name]):.0f}" for name in names)]
        for found in _by_input(docs, "forward")
    ]
    return markdown_table([*_INPUT, *(f"`{name}`" for name in names)], lines, ["choice"])


def backward_table(docs: Path) -> str:
    """TFLOP/s of backward, and how much longer a deterministic one takes."""
    names = ("hopper", "triton", "TileLang")
    lines = []
    for found in _by_input(docs, "backward"):
        fixed, plain = (found[name].times.median for name in ("hopper, in order", "hopper"))
        rates = (f"{_tflops(found[name]):.0f}" for name in names)
        lines.append([*_of_input(found["hopper"]), *rates, f"{fixed / plain:.2f}"])
    head = [*_INPUT, *(f"`{name}`" for name in names), "deterministic `hopper`, time"]
    return markdown_table(head, lines, ["choice"])


def indexer_table(docs: Path) -> str:
    """Milliseconds of scores and choice, and the least of the choice that fp32 agrees with."""
    lines = [
        [
            tokens_text(row.case.kv),
            f"`{row.case.implementation}`",
            f"{row.times.median * 1e3:.2f}",
            f"{row.more['scores_ms']:.2f}",
            f"{row.more['share']:.2f}",
            f"{row.more['bound']:.2f}",
            f"{row.more['agreement']:.3f}",
        ]
        for found in _by_input(docs, "indexer")
        for row in found.values()
    ]
    head = ["keys", "backend", "ms", "scores alone, ms", "share", "bound", "agreement"]
    return markdown_table(head, lines, ["backend"])


def decode_table(docs: Path) -> str:
    """Microseconds of sparse decode, with its parts, beside dense decode and FlashMLA."""
    lines: list[list[str]] = []
    for row in recorded(docs / "dsa" / "decode.json"):
        case = row.case
        if case.implementation == "sparse, hopper":
            parts = (row.times.median * 1e6, row.more.select_us, row.more.attend_us)
            lines.append([str(case.heads), tokens_text(case.kv), *(f"{us:.0f}" for us in parts)])
        elif case.implementation in ("FlashMLA", "dense, hopper"):
            lines[-1].append(f"{row.times.median * 1e6:.0f}")
    head = ["heads", "keys", "sparse us", "choice us", "attention us"]
    head += ["`FlashMLA`, attention us", "dense us"]
    return markdown_table(head, lines, [])


def layer_table(docs: Path) -> str:
    """Milliseconds of a step of whole layers, and the memory of our sparse one."""
    ours = ("sparse", "warm-up", "dense", _TILELANG)
    found: dict[int, dict[str, Any]] = {}
    for name in ("layer-4k.json", "layer.json", "layer-tilelang.json"):
        for row in recorded(docs / "dsa" / name):
            works = found.setdefault(row.case.tokens, {})
            for work in without_errors(row.works):
                works.setdefault(work.name, work)
    lines = [
        [
            tokens_text(tokens),
            *(f"{works[one].step.median * 1e3:.1f}" if one in works else "-" for one in ours),
            f"{works['sparse'].peak_bytes / 2**30:.1f}",
        ]
        for tokens, works in sorted(found.items())
    ]
    head = ["tokens", "sparse ms", "warm-up ms", "dense ms", "Megatron, TileLang ms", "sparse GiB"]
    return markdown_table(head, lines, [])


def _by_input(docs: Path, work: str) -> list[dict[str, Any]]:
    """Rows of a work with the same input, by implementation."""
    measured = DSAReport.read(docs / "dsa" / "kernels.json").measured
    return by_input(
        (row for row in measured if row.case.work == work),
        lambda row: row.case.input,
        lambda row: row.case.implementation,
    )


def _of_input(row: Any) -> list[str]:
    case = row.case
    return [str(case.heads), tokens_text(case.kv), "shared" if case.shared else "random"]


def _tflops(row: Any) -> float:
    rate: float = row.more["flops"] / row.times.median / 1e12
    return rate
