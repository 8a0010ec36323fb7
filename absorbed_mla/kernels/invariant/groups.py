"""Grouped tile order of a GEMM, for kernels in Triton and in Gluon, which each compile it."""

import triton.language as tl


def place_in_groups(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Row and column of a tile: rows change first, within groups of ``GROUP`` tiles of rows.

    So tiles that are computed at one time find their rows and columns in the cache.
    """
    group_tiles = GROUP * column_tiles
    first = tile // group_tiles * GROUP
    in_group = min(row_tiles - first, GROUP)
    place = tile % group_tiles
    return first + place % in_group, place // in_group
