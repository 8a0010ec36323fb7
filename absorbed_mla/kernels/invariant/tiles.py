"""Tiles of the batch-invariant product: they settle its speed and must not settle its bits.

An element is the sum over parts of ``PART`` summands, added one after the other in fp32. A part is
a sum in steps of ``SUMMANDS``, each by instructions of one kind: all tiles have at least 64 rows
and 4 warps, so that Hopper's warp-group instruction computes them, whose order of sums should
depend neither on the rows nor on the columns of a tile. The benchmark ``invariant_products.py``
compares the bits on a GPU; should they differ there, a single tile in ``TILES`` makes them equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PART = 2048
# Summands of a step, by dtype; the same in all tiles of the dtype.
SUMMANDS = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 32}
# Programs that keep the memory of an H200 busy: two for each of its 132 multiprocessors.
_ENOUGH = 264


@dataclass(frozen=True)
class Tile:
    """Rows and columns that a program computes.

    Attributes:
        rows: Of the tile, at least 64.
        columns: Of the tile.
        num_warps: Of a program, a multiple of 4.
        num_stages: Steps that are loaded ahead, plus one.
        least_rows: Products of fewer rows take a later tile of the table.
        few: In products of fewer tiles than this, each part of a tile has a program.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    least_rows: int = 0
    few: int = _ENOUGH

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.num_warps}x{self.num_stages}"

    def count(self, rows: int, columns: int) -> int:
        """Tiles of a product."""
        return -(-rows // self.rows) * -(-columns // self.columns)


# With few rows the weights are all that is read. Narrow tiles read the rows more often, wide ones
# are few: the first tile that is enough programs is taken.
TILES = (
    Tile(128, 128, num_warps=8, num_stages=4, least_rows=65, few=96),
    Tile(64, 128, num_warps=4, num_stages=4, least_rows=17),
    Tile(64, 64, num_warps=4, num_stages=4),
    Tile(64, 32, num_warps=4, num_stages=5),
)
# fp32 has no instruction for tiles: products are sums of one element after the other.
FP32_TILE = Tile(32, 64, num_warps=4, num_stages=3)


def tile_for(rows: int, columns: int, parts: int, dtype: torch.dtype) -> Tile:
    """The tile of a product.

    Args:
        rows: Of the product.
        columns: Of the product.
        parts: Of each sum.
        dtype: Of the operands, one of ``SUMMANDS``.
    """
    if dtype == torch.float32:
        return FP32_TILE
    for tile in TILES:
        if rows >= tile.least_rows and parts * tile.count(rows, columns) >= _ENOUGH:
            return tile
    return TILES[-1]
