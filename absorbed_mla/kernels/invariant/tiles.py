"""Tiles of the batch-invariant product: they settle its speed and must not settle its bits.

An element is the sum over parts of :func:`part_length` summands, which depends on the weight only,
added one after the other in fp32. A part is a sum in steps of ``SUMMANDS``, each by instructions of
one kind: all tiles have at least 64 rows and 4 warps, so that Hopper's warp-group instruction
computes them, whose order of sums should depend neither on the rows nor on the columns of a tile.
On a GPU ``test_matrix_product.py`` compares the bits; should they differ there, a single tile in
``TILES`` makes them equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# The shortest part of a sum of several.
PART = 2048
# Of a sum by a tree: what waits for its neighbour is in registers, a tile for each level.
MOST_LEAVES = 8
# Summands of a step, by dtype; the same in all tiles of the dtype.
SUMMANDS = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 32}
# Tiles of rows that are computed side by side, so that they find the columns in the cache.
GROUP = 8
# Times that an H200 is filled by so many tiles that the last ones do not matter.
_MANY = 8
# Multiprocessors of an H200.
_PROCESSORS = 132
# Programs that keep its memory busy: two for each of them.
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
        enough: So do those in which fewer parts of tiles are summed up.
        most: And those of more.
        few: In products of fewer tiles than this, each part of a tile has a program.
        at_once: Programs that an H200 runs at the same time; 0: it is no matter. Where the last
            tiles of a product would keep less than half of it busy, their parts have programs.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    least_rows: int = 0
    enough: int = _ENOUGH
    most: float = math.inf
    few: int = _ENOUGH
    at_once: int = 0

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.num_warps}x{self.num_stages}"

    @property
    def is_wide(self) -> bool:
        """Whether it is one of hopper/product_kernel.py, whose programs have three warpgroups."""
        return self.num_warps == 12

    def count(self, rows: int, columns: int) -> int:
        """Tiles of a product."""
        return self.row_tiles(rows) * -(-columns // self.columns)

    def row_tiles(self, rows: int) -> int:
        """Tiles that lie below each other."""
        return -(-rows // self.rows)

    def is_enough(self, rows: int, columns: int, parts: int) -> bool:
        """Whether a product of parts of these tiles keeps the memory busy.

        Args:
            rows: Of the product.
            columns: Of the product.
            parts: Of each sum.
        """
        programs = parts * self.count(rows, columns)
        return rows >= self.least_rows and self.enough <= programs <= self.most

    def in_parts(self, rows: int, columns: int, parts: int) -> int:
        """How many of the last tiles of a product have a program for each part.

        Args:
            rows: Of the product.
            columns: Of the product.
            parts: Of each sum.
        """
        tiles, below = self.count(rows, columns), self.row_tiles(rows)
        if parts == 1:
            return 0
        if tiles < self.few:
            return tiles
        # Of many tiles the last ones are a small share. Those of a column stay together.
        if not self.at_once or tiles > _MANY * self.at_once or below > GROUP:
            return 0
        last = -(-(tiles % self.at_once) // below) * below
        return last if last <= self.at_once // 2 else 0

    def turns(self, rows: int, columns: int, parts: int) -> float:
        """How often an H200 is given as many tiles of a product as it runs at the same time.

        Args:
            rows: Of the product.
            columns: Of the product.
            parts: Of each sum.
        """
        in_parts = self.in_parts(rows, columns, parts)
        whole = self.count(rows, columns) - in_parts
        return -(-whole // self.at_once) + -(-in_parts * parts // self.at_once) / parts


# With few rows the weights are all that is read. Narrow tiles read the rows more often, wide ones
# are few: the first tile that is enough programs is taken.
TILES = (
    # So deep that a multiprocessor has room for two programs: for those that all run at a time.
    Tile(64, 64, num_warps=4, num_stages=5, enough=96, most=_ENOUGH),
    Tile(128, 128, num_warps=8, num_stages=4, least_rows=65, enough=96, few=96, at_once=132),
    Tile(64, 128, num_warps=4, num_stages=4, least_rows=17, at_once=264),
    Tile(64, 64, num_warps=4, num_stages=4),
    Tile(64, 32, num_warps=4, num_stages=5),
)
# Of many rows on Hopper.
WIDE_TILE = Tile(128, 256, num_warps=12, num_stages=4, least_rows=512, few=0, at_once=132)
# Its time in those of the tile of 128 columns: 1.34 to 1.39 in the products of DeepSeek-V3's layers
# (H100).
_WIDE_TIME = 1.4
# fp32 has no instruction for tiles: products are sums of one element after the other.
FP32_TILES = (
    Tile(32, 64, num_warps=4, num_stages=3, enough=_PROCESSORS),
    # Of a router with few tokens a program takes an eighth of the time.
    Tile(16, 16, num_warps=4, num_stages=4),
)


def part_length(summands: int, columns: int, shortest: int = PART) -> int:
    """Summands of a part; the last one may have fewer.

    Parts are stored in fp32 and read again. So there are no more of them than multiprocessors for
    the tiles of 128 columns, where these are between a third of them and a half.

    Args:
        summands: Of an element.
        columns: Of the product.
        shortest: Least number of a sum of several parts.
    """
    tiles = -(-columns // 128)
    if not _PROCESSORS // 3 < tiles <= _PROCESSORS // 2 or summands <= 2 * shortest:
        return shortest
    step = max(SUMMANDS.values())
    return -(-summands // (2 * step)) * step


def tile_for(rows: int, columns: int, parts: int, dtype: torch.dtype) -> Tile:
    """The tile of a product.

    Args:
        rows: Of the product.
        columns: Of the product.
        parts: Of each sum.
        dtype: Of the operands, one of ``SUMMANDS``.
    """
    tiles = FP32_TILES if dtype == torch.float32 else TILES
    return next((t for t in tiles if t.is_enough(rows, columns, parts)), tiles[-1])


def is_wide_faster(rows: int, columns: int, parts: int) -> bool:
    """Whether ``WIDE_TILE`` is, where it is possible: by the turns of whole tiles.

    Args:
        rows: Of the product.
        columns: Of the product.
        parts: Of each sum.
    """
    if rows < WIDE_TILE.least_rows:
        return False
    tile = tile_for(rows, columns, parts, torch.bfloat16)
    if tile.columns != 128 or not tile.at_once:
        return False
    turns = WIDE_TILE.turns(rows, columns, parts)
    return _WIDE_TIME * turns <= tile.turns(rows, columns, parts)
