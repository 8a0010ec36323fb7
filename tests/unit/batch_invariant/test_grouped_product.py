"""Parity mode's product of rows with their experts' weights: the bits of each expert alone.

In Triton's interpreter without a GPU.
"""

from functools import partial

import pytest
import torch
from torch import Tensor

from absorbed_mla.batch_invariant.tree import tree_sum
from tests.support import needs, world
from tests.support.backends import multiply_in_one_order, triton_interpreter
from tests.support.combinations import grid
from tests.support.numerics import random

with triton_interpreter():
    from absorbed_mla.kernels.invariant import grouped_product as kernel
    from absorbed_mla.kernels.invariant import matrix_product as reference
    from absorbed_mla.kernels.invariant.grouped_product import TILES, TREE_TILES, grouped_product
    from absorbed_mla.kernels.invariant.matrix_product import matrix_product

pytestmark = pytest.mark.usefixtures("interpreted")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
bf16 = partial(random, dtype=BF16)
# More than one tile of columns, and three parts or two leaves of several steps, the last ones not
# full; eight leaves are shorter than a step.
SUMMANDS, COLUMNS = 328, 130
SMALL_PART = 128
# Rows of each expert: few, none, more than a tile, all with one, none at all; of experts that are
# no power of two, and one.
DISTRIBUTIONS = {
    "few": [1, 0, 3, 0, 0, 7],
    "many": [0, 130, 1, 64, 65, 0, 0],
    "one of all": [0, 0, 140, 0],
    "alone": [9],
    "none": [0, 0, 0],
}
DTYPES = {"fp32": FP32, "bf16": BF16, "fp16": FP16}
LEAVES = (None, 2, 4, 8)
# Tiles of parts one after the other, and of leaves.
ORDERS = {str(tile): (tile, None) for tile in TILES}
ORDERS |= {f"{tile}-8": (tile, 8) for tile in TREE_TILES}


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32).to(world.device())


def one_by_one(
    rows: Tensor, weights: Tensor, counts: list[int], leaves: int | None = None
) -> Tensor:
    """What ``matrix_product`` gives for each expert alone, or for each of its leaves."""
    alone = [product(*pair, leaves) for pair in zip(rows.split(counts), weights.mT)]
    return torch.cat(alone)


def product(left: Tensor, right: Tensor, leaves: int | None) -> Tensor:
    if leaves is None:
        return matrix_product(left, right)
    length = left.shape[1] // leaves
    pairs = zip(left.split(length, 1), right.split(length))
    products = [matrix_product(*pair, dtype=FP32, part=length) for pair in pairs]
    return tree_sum(products).to(left.dtype)


class TestBits:
    @pytest.fixture(autouse=True)
    def _one_order(self, monkeypatch):
        """Several parts of few summands."""
        multiply_in_one_order(monkeypatch)
        for module in (kernel, reference):
            monkeypatch.setattr(module, "PART", SMALL_PART)

    @grid(1, {"counts": DISTRIBUTIONS, "dtype": DTYPES, "leaves": LEAVES})
    def test_of_each_expert_alone(self, dtype, counts, leaves):
        rows = random(sum(counts), SUMMANDS, dtype=dtype)
        weights = random(len(counts), COLUMNS, SUMMANDS, dtype=dtype, seed=1)
        found = grouped_product(rows, weights, ends_of(counts), leaves=leaves)
        assert found.dtype == dtype
        assert torch.equal(found, one_by_one(rows, weights, counts, leaves))

    @grid(1, {"counts": DISTRIBUTIONS, "order": ORDERS})
    def test_of_all_tiles(self, order, counts):
        """Also of rows that are taken from others, some of them several times."""
        x, weights = bf16(20, SUMMANDS), bf16(len(counts), COLUMNS, SUMMANDS, seed=1)
        tokens = torch.arange(sum(counts), device=x.device) * 7 % 20
        tile, leaves = order
        expected = one_by_one(x[tokens], weights, counts, leaves)
        found = grouped_product(x, weights, ends_of(counts), tokens, tile=tile, leaves=leaves)
        assert torch.equal(found, expected)

    def test_rows_behind_the_last_end(self):
        """They belong to nobody: there are fewer tiles than programs."""
        counts = [5, 0, 70]
        rows, weights = bf16(200, SUMMANDS), bf16(3, COLUMNS, SUMMANDS, seed=1)
        rows[75:] = torch.nan
        found = grouped_product(rows, weights, ends_of(counts))[:75]
        assert torch.equal(found, one_by_one(rows[:75], weights, counts))

    def test_of_one_leaf(self):
        """A single sum, whatever the number of columns."""
        x, weights = random(9, SUMMANDS, dtype=FP32), random(1, 9, SUMMANDS, dtype=FP32, seed=1)
        found = grouped_product(x, weights, ends_of([9]), leaves=1)
        assert torch.equal(found, matrix_product(x, weights[0].T, part=SUMMANDS))
        assert torch.equal(grouped_product(x, weights, ends_of([9]), part=SUMMANDS), found)

    def test_the_comparison_can_fail(self, monkeypatch):
        """Sums in other parts have other bits, as have parts one after the other."""
        rows, weights = random(9, SUMMANDS, dtype=FP32), random(1, 9, SUMMANDS, dtype=FP32, seed=1)
        expected = one_by_one(rows, weights, [9])
        monkeypatch.setattr(kernel, "PART", SUMMANDS)
        assert not torch.equal(grouped_product(rows, weights, ends_of([9])), expected)
        in_order = grouped_product(rows, weights, ends_of([9]), part=SUMMANDS // 4)
        assert not torch.equal(grouped_product(rows, weights, ends_of([9]), leaves=4), in_order)


def test_every_tile_has_a_program():
    """However rows are distributed: the grid holds for the worst."""
    for tile, _ in ORDERS.values():
        for counts in ([1] * 7, [tile.rows + 1] * 3, [5 * tile.rows], [tile.rows, 1, 1]):
            needed = sum(-(-count // tile.rows) for count in counts)
            assert needed <= kernel.row_tiles(sum(counts), len(counts), tile)


@pytest.mark.parametrize(
    ("rows", "experts", "columns", "expected", "of_leaves"),
    [
        (8, 16, 7168, (64, 64), (64, 64)),
        (1024, 16, 7168, (64, 128), (64, 64)),
        (8192, 16, 7168, (128, 128), (128, 64)),
        # Of few experts wide tiles are too few programs, unless they have many rows.
        (320, 4, 1024, (64, 64), (64, 64)),
        (4096, 4, 1024, (128, 128), (128, 64)),
    ],
)
def test_tile(rows, experts, columns, expected, of_leaves):
    for leaves, wanted in ((1, expected), (2, of_leaves)):
        tile = kernel.tile_for(rows, experts, columns, BF16, leaves)
        assert (tile.rows, tile.columns) == wanted


def test_all_tiles_sum_in_one_order():
    """Warp-group instructions need 64 rows and 4 warps."""
    assert all(tile.rows % 64 == tile.num_warps % 4 == 0 for tile, _ in ORDERS.values())


@needs.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("leaves", LEAVES)
@pytest.mark.parametrize(
    ("summands", "columns"), [(7168, 4096), (2048, 7168), (4608, 6144), (1000, 264)]
)
def test_bits_on_a_gpu(dtype, summands, columns, leaves):
    """At widths of DeepSeek-V3's experts, in every tile; also of rows that are taken.

    By a tree also of leaves that end amid a step, and lie at odd places.
    """
    counts = [1, 0, 8, 64, 65, 0, 130, 300]
    rows = random(sum(counts), summands, dtype=dtype)
    weights = torch.empty(len(counts), columns, summands, dtype=dtype, device=rows.device)
    weights.normal_(std=summands**-0.5)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(2)).to(rows.device)
    shuffled = torch.empty_like(rows).index_copy_(0, order, rows)
    expected, ends = one_by_one(rows, weights, counts, leaves), ends_of(counts)
    for tile in (None, *(TREE_TILES if leaves else TILES)):
        options = {"tile": tile, "leaves": leaves}
        assert torch.equal(grouped_product(rows, weights, ends, **options), expected), str(tile)
        found = grouped_product(shuffled, weights, ends, order, **options)
        assert torch.equal(found, expected), str(tile)
