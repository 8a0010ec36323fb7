#!/usr/bin/env python3
"""Measure parity mode's matrix product beside PyTorch's and Megatron's batch-invariant one.

    $ python scripts/benchmarks/invariant_products.py --json products.json
    $ python scripts/benchmarks/invariant_products.py --works proj --rows 32 --tiles 64x64x4x5
    $ python scripts/benchmarks/invariant_products.py --rows 1k,8k --tiles 128x128x8x4,128x256x12x3

Rows of bf16 times a weight [outputs, inputs], as linear layers have it, of DeepSeek-V3's widths.
Implementations of an input are repeated in turns; each call takes another copy of the weight, so
that it comes from memory. Megatron's are its operator for PyTorch's ``mm``, and that for the layers
of TransformerEngine, which copies the weight. "ratio" is the time divided by PyTorch's.

Every tile, whole and in parts, must give the rows the bits that they have among the most rows;
"changed" counts what does not, and makes the exit code 1. Output:

    9.1 s  proj, 32 rows: ours: us ..., tbps ..., tflops ..., ratio ..., changed 0
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.kit.timing import Repeated

torch: Any = kit.lazy("torch")
# Inputs and outputs of DeepSeek-V3's layers.
WORKS = {
    "q_down": (7168, 1536),
    "kv_down": (7168, 576),
    "q_up": (1536, 24576),
    "proj": (16384, 7168),
    "fc1": (7168, 36864),
    "fc2": (18432, 7168),
}
TORCH, OURS, MEGATRON, MEGATRON_TE = "torch", "ours", "megatron mm", "megatron TE"
# Of all copies of a weight: several times the cache of an H200.
_COPIES_BYTES = 200e6
# Rows that all tiles are compared in.
_COMPARED = 256


@dataclass(frozen=True)
class ProductCase(kit.Case):
    """One product."""

    text = "{work}, {rows} rows: {implementation}"
    work: str  # name of the product, or its inputs and outputs
    rows: int  # tokens
    implementation: str  # "torch", "ours", one of Megatron's, or ours with a tile's name

    @property
    def widths(self) -> tuple[int, int]:
        """Inputs and outputs."""
        if self.work in WORKS:
            return WORKS[self.work]
        inputs, outputs = map(int, self.work.split("x"))
        return inputs, outputs


@dataclass(frozen=True, kw_only=True)
class Row(kit.Row):
    """Times of a call, and of ours what gave other bits, such as a tile."""

    case: ProductCase
    times: kit.Times | None = None
    changed: list[str] = field(default_factory=list)


class ProductReport(kit.Report):
    """One run."""

    row = Row

    def figures(self, row: Row) -> dict[str, float]:
        """Microseconds, TB/s of operands and result, TFLOP/s, and the ratio to PyTorch."""
        assert row.times is not None
        seconds, rows, (inputs, outputs) = row.times.median, row.case.rows, row.case.widths
        moved = 2 * (rows * inputs + inputs * outputs + rows * outputs)
        found = {"us": 1e6 * seconds, "tbps": moved / seconds / 1e12}
        found["tflops"] = 2 * rows * inputs * outputs / seconds / 1e12
        peer = replace(row.case, implementation=TORCH)
        for other in self.measured:
            if other.case == peer and other is not row:
                found["ratio"] = seconds / other.times.median
        if row.case.implementation.startswith(OURS):
            found["changed"] = len(row.changed)
        return found

    @classmethod
    def panels(cls, reports: Sequence[ProductReport]) -> list[kit.Panel]:
        """Microseconds over the rows."""
        return cls.over(reports, "{0.work} [us]", "us", "rows", "rows", log_y=True)

    @classmethod
    def notes(cls, reports: Sequence[ProductReport]) -> list[str]:
        """What gave other bits."""
        rows = [row for report in reports for row in report.rows if row.changed]
        lines = [f"- {row.case}: {', '.join(row.changed)}" for row in rows]
        return ["\n".join(["Rows got other bits:", "", *lines])] if lines else []


def _work(text: str) -> str:
    name = text.strip()
    if name not in WORKS and not re.fullmatch(r"[1-9]\d*x[1-9]\d*", name):
        raise argparse.ArgumentTypeError(
            f"expected {', '.join(WORKS)} or INPUTSxOUTPUTS, got {text!r}"
        )
    return name


def _tile(text: str) -> tuple[int, ...]:
    sizes = tuple(map(int, re.findall(r"\d+", text)))
    if not re.fullmatch(r"\d+x\d+x\d+x\d+", text.strip()) or sizes[0] % 64 or sizes[2] % 4:
        raise argparse.ArgumentTypeError(
            "expected ROWSxCOLUMNSxWARPSxSTAGES with multiples of 64 rows and of 4 warps, such as "
            f"128x128x8x4; got {text!r}"
        )
    if sizes[2] == 12 and (sizes[:2] != (128, 256) or not 1 <= sizes[3] <= 4):
        raise argparse.ArgumentTypeError(
            "expected 128x256x12xSTAGES with at most 4 stages for 12 warps, the kernel of many "
            f"rows for Hopper; got {text!r}"
        )
    return sizes


class ProductBenchmark(kit.InTurns):
    """All implementations of an input in turns."""

    report = ProductReport
    options = kit.declare(
        "json plot render only device seconds_per_row=0.05 time_limit=45 seed=1234",
        works=kit.Option(
            "products by name, or as INPUTSxOUTPUTS", kit.list_of(_work), ",".join(WORKS)
        ),
        rows=kit.sizes("numbers of tokens", "1,8,32,128,2k,8k"),
        tiles=kit.Option(
            "more tiles to measure ours with, as ROWSxCOLUMNSxWARPSxSTAGES", kit.list_of(_tile)
        ),
    )
    quick = "--works 40x33 --rows 1,70"
    recorded = ("ceilings",)

    def prepare(self) -> None:
        """The tiles, and no operands yet."""
        super().prepare()
        from absorbed_mla.kernels.invariant.tiles import Tile

        self._tiles = {f"{OURS} {Tile(*sizes)}": Tile(*sizes) for sizes in self.args.tiles or ()}
        # Of the work at hand: input, copies of the weight, and our result of the most rows.
        self._work = ""
        self._operands: tuple[Tensor, list[Tensor], Tensor] | None = None

    def cases(self) -> list[ProductCase]:
        """PyTorch first, which the others are compared with."""
        return [
            ProductCase(work, rows, implementation)
            for work in self.args.works
            for rows in sorted(self.args.rows)
            for implementation in (TORCH, OURS, MEGATRON, MEGATRON_TE, *self._tiles)
        ]

    def exit_code(self, report: ProductReport) -> int:
        """1 if a row got other bits."""
        return int(any(row.changed for row in report.rows))

    def work(self, case: ProductCase) -> Repeated:
        """The product."""
        from benchmarks.kit.timing import Repeated

        run = self._call(case)
        run()
        self.processes.synchronize()
        return Repeated(run, on_gpu=self.processes.on_gpu)

    def timed(self, case: ProductCase, times: kit.Times) -> Row:
        """With what gave other bits."""
        return Row(case=case, times=times, changed=self._changed(case))

    def _operands_of(self, case: ProductCase) -> tuple[Tensor, list[Tensor], Tensor]:
        """Input of the most rows, copies of the weight, and our product of the first."""
        if self._work != case.work or self._operands is None:
            from absorbed_mla.kernels.invariant.matrix_product import matrix_product

            self._operands = None
            inputs, outputs = case.widths
            random, size = self.processes.random, self.processes.dtype.itemsize
            x = random(max(self.args.rows), inputs)
            weight = random(outputs, inputs) * inputs**-0.5
            count = 1 + int(_COPIES_BYTES / (size * inputs * outputs))
            copies = [weight, *(weight.clone() for _ in range(min(count, 64) - 1))]
            self._work, self._operands = case.work, (x, copies, matrix_product(x, weight.T))
        return self._operands

    def _call(self, case: ProductCase) -> Callable[[], Tensor]:
        """What is timed."""
        from megatron.core.transformer.custom_layers import batch_invariant_kernels as megatron

        x, copies, _ = self._operands_of(case)
        rows, weights = x[: case.rows], itertools.cycle(copies)
        if case.implementation == MEGATRON_TE:
            product = megatron.BatchInvariantTEGemmFn.apply
            return lambda: product(next(weights), rows, None, None, "TN")
        products = {TORCH: torch.matmul, MEGATRON: megatron.matmul_persistent}
        matmul = products.get(case.implementation) or self._ours(case)
        return lambda: matmul(rows, next(weights).T)

    def _ours(self, case: ProductCase) -> Callable[[Tensor, Tensor], Tensor]:
        from absorbed_mla.kernels.invariant.matrix_product import matrix_product

        tile = self._tiles.get(case.implementation)
        return partial(matrix_product, tile=tile) if tile else matrix_product

    def _changed(self, case: ProductCase) -> list[str]:
        """What gives a row of ours other bits than it has among the most rows."""
        if not case.implementation.startswith(OURS):
            return []
        x, [weight, *_], whole = self._operands_of(case)
        found = self._ours(case)(x[: case.rows], weight.T)
        changed = [] if torch.equal(found, whole[: case.rows]) else ["number of rows"]
        if case.implementation == OURS:
            count = min(case.rows, _COMPARED)
            for name, product in _variants(x, weight):
                if not torch.equal(product(x[:count], weight.T), whole[:count]):
                    changed.append(name)
        return changed


def _variants(x: Tensor, weight: Tensor) -> Iterator[tuple[str, Callable]]:
    """Our product with every tile of these, whole and in parts, by name."""
    from absorbed_mla.kernels.hopper.product import can_multiply
    from absorbed_mla.kernels.invariant import tiles
    from absorbed_mla.kernels.invariant.matrix_product import has_wide_tile, matrix_product

    lie_in_rows = partial(can_multiply, x[:1], weight.T, None)
    if has_wide_tile(x.device) and lie_in_rows(x.new_empty(1, len(weight))):
        yield f"tile {tiles.WIDE_TILE}", partial(matrix_product, tile=tiles.WIDE_TILE)
    for tile in tiles.FP32_TILES if x.dtype == torch.float32 else tiles.TILES:
        for split in (False, True):
            name = f"tile {tile} {'in parts' if split else 'whole'}"
            yield name, partial(matrix_product, tile=tile, split=split)


if __name__ == "__main__":
    kit.main(ProductBenchmark)
