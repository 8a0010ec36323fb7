"""Products by a tree of leaves: the bits of the definition, of every tile and number of subtrees.

In Triton's interpreter without a GPU.
"""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from absorbed_mla.batch_invariant.tree import tree_sum
from tests.support import needs
from tests.support.backends import multiply_in_one_order, triton_interpreter
from tests.support.combinations import grid
from tests.support.numerics import random, relative_error

with triton_interpreter():
    from absorbed_mla.kernels.invariant import tree_product as kernel
    from absorbed_mla.kernels.invariant.matrix_product import matrix_product
    from absorbed_mla.kernels.invariant.tiles import FP32_TILES
    from absorbed_mla.kernels.invariant.tree_product import TILES, WIDE_TILE, tree_product

pytestmark = pytest.mark.usefixtures("interpreted")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
bf16 = partial(random, dtype=BF16)
BOUNDS = {BF16: 4e-3, FP16: 5e-4, FP32: 5e-6}
# Leaves of 33 summands end within a step.
ROWS, COLUMNS, LEAVES, SUMMANDS = 70, 130, 8, 264


def by_definition(left, right, leaves, runs=1, dtype=None):
    """A product for each leaf."""
    length = left.shape[1] // leaves
    slices = [slice(i * length, (i + 1) * length) for i in range(leaves)]
    slices = [part for first in range(leaves // runs) for part in slices[first :: leaves // runs]]
    parts = [matrix_product(left[:, own], right[own], dtype=FP32, part=2**20) for own in slices]
    return tree_sum(parts).to(dtype or left.dtype)


class TestBits:
    @pytest.fixture(autouse=True)
    def _one_order(self, monkeypatch):
        multiply_in_one_order(monkeypatch)

    @grid(1, {"runs": [1, 2], "leaves": [1, 2, 4, 8], "dtype": [BF16, FP32], "out": [None, FP32]})
    def test_of_the_definition(self, runs, leaves, dtype, out):
        if runs > leaves:
            runs = 1
        x, w = random(5, SUMMANDS, dtype=dtype), random(40, SUMMANDS, dtype=dtype, seed=1)
        found = tree_product(x, w.T, leaves, runs, out)
        assert found.dtype == (out or dtype)
        assert torch.equal(found, by_definition(x, w.T, leaves, runs, out))

    @grid(1, {"tile": [*TILES, *FP32_TILES], "subtrees": [1, 2, 4, 8]})
    def test_of_all_tiles(self, tile, subtrees, monkeypatch):
        """A program for each subtree; of some rows at a time."""
        monkeypatch.setattr(kernel, "_MOST_WAITING", 64 * 4 * COLUMNS * subtrees)
        dtype = FP32 if tile in FP32_TILES else BF16
        x, w = random(ROWS, SUMMANDS, dtype=dtype), random(COLUMNS, SUMMANDS, dtype=dtype, seed=1)
        found = tree_product(x, w.T, LEAVES, 2, tile=tile, subtrees=subtrees)
        assert torch.equal(found, by_definition(x, w.T, LEAVES, 2))

    def test_of_more_leaves_than_a_program_sums(self):
        x, w = random(3, 128, dtype=FP32), random(128, 33, dtype=FP32)
        assert torch.equal(tree_product(x, w, 32, 2), by_definition(x, w, 32, 2))

    def test_of_ranks(self):
        """What ranks sum by themselves is added by the rest of the tree."""
        x, w = random(3, SUMMANDS, dtype=FP32), random(SUMMANDS, 33, dtype=FP32)
        halves = [tree_product(a, b, 4) for a, b in zip(x.chunk(2, 1), w.chunk(2))]
        assert torch.equal(tree_sum(halves), tree_product(x, w, 8))

    def test_the_comparison_can_fail(self):
        x, w = random(ROWS, SUMMANDS, dtype=FP32), random(SUMMANDS, COLUMNS, dtype=FP32, seed=1)
        found = tree_product(x, w, LEAVES)
        assert not torch.equal(found, by_definition(x, w, LEAVES, 2))
        assert not torch.equal(found, matrix_product(x, w, part=SUMMANDS // LEAVES))


class TestValues:
    @pytest.mark.parametrize("layout", ["rows", "columns", "slices"])
    @pytest.mark.parametrize("dtype", BOUNDS, ids=str)
    def test_of_strides(self, layout, dtype):
        views = {
            "rows": lambda t: t,
            "columns": lambda t: t.T.contiguous().T,
            "slices": lambda t: torch.cat((t, t), 1)[:, ::2],
        }
        x, w = random(80, SUMMANDS, dtype=dtype), random(SUMMANDS, COLUMNS, dtype=dtype, seed=1)
        left, right = views[layout](x), views[layout](w)
        expected = left.double() @ right.double()
        assert relative_error(tree_product(left, right, LEAVES), expected) < BOUNDS[dtype]

    @pytest.mark.parametrize("shape", [(0, 8, 5), (3, 0, 5), (3, 8, 0)])
    def test_of_nothing(self, shape):
        rows, summands, columns = shape
        found = tree_product(bf16(rows, summands), bf16(summands, columns), LEAVES)
        assert torch.equal(found, torch.zeros(rows, columns, dtype=BF16))


class TestChoice:
    @pytest.mark.parametrize(
        ("rows", "columns", "leaves", "expected"),
        [
            (32, 7168, 8, 2),  # 112 tiles
            (128, 7168, 8, 4),
            (1024, 7168, 8, 1),
            (1, 2048, 8, 8),
            (4096, 7168, 32, 4),  # a program sums 8 leaves at most
        ],
    )
    def test_subtrees(self, rows, columns, leaves, expected):
        tile = kernel._tile_for(rows, BF16)
        assert kernel._subtrees(tile, tile.count(rows, columns), leaves) == expected

    def test_wide_tile(self, monkeypatch):
        """Where it fills the device and leaves are whole steps."""
        pytest.importorskip("triton.experimental.gluon")
        monkeypatch.setattr(kernel, "has_wide_tile", lambda device: True)
        x, w = torch.empty(1024, 512, dtype=BF16), torch.empty(512, 7168, dtype=BF16)
        for dtype, leaf, rows, expected in (
            (BF16, 64, 1024, True),
            (FP32, 64, 256, True),
            (FP16, 64, 1024, False),
            (BF16, 72, 1024, False),
            (BF16, 64, 128, False),
        ):
            result = torch.empty(rows, 7168, dtype=dtype)
            assert kernel._is_wide_chosen(x[:rows], w, result, leaf) == expected


@needs.hopper
@pytest.mark.parametrize(
    ("dtype", "out"), [(BF16, None), (BF16, FP32), (FP16, None)], ids=["bf16", "fp32", "fp16"]
)
@pytest.mark.parametrize(
    ("rows", "leaf", "columns", "leaves", "runs"),
    [
        (1024, 2048, 7168, 8, 1),
        (1000, 576, 2112, 16, 2),
        (77, 128, 264, 2, 2),
        (300, 64, 520, 64, 2),
        (2100, 192, 264, 4, 1),
    ],
)
def test_bits_on_a_gpu(rows, leaf, columns, leaves, runs, dtype, out):
    """Of every tile and number of subtrees, and of the wide tile, however operands lie."""
    x = random(rows, leaf * leaves, dtype=dtype)
    w = random(columns, leaf * leaves, dtype=dtype, seed=1) * (leaf * leaves) ** -0.5
    expected = by_definition(x, w.T, leaves, runs, out)
    assert relative_error(expected, x.double() @ w.double().T) < 2 * BOUNDS[dtype]
    lefts = [x] if rows % 8 else [x, x.T.contiguous().T]
    for left, right in itertools.product(lefts, (w.T, w.T.contiguous())):
        found = tree_product(left, right, leaves, runs, out, tile=WIDE_TILE)
        assert torch.equal(found, expected), ("wide", left.stride(), right.stride())
    for tile, subtrees in ((TILES[0], max(leaves // 8, 1)), (TILES[1], leaves // 2)):
        found = tree_product(x[:130], w.T, leaves, runs, out, tile=tile, subtrees=subtrees)
        assert torch.equal(found, expected[:130]), (str(tile), subtrees)
    for count in (1, 17, 65, rows):
        assert torch.equal(tree_product(x[:count], w.T, leaves, runs, out), expected[:count])


@needs.gpu
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("leaf", "leaves"), [(176, 8), (1368, 8), (33, 4)])
def test_bits_of_odd_leaves_on_a_gpu(leaf, leaves, dtype):
    """V2-Lite's, which are no whole steps, and ones that vectors do not divide."""
    x = random(300, leaf * leaves, dtype=dtype)
    w = random(2048, leaf * leaves, dtype=dtype, seed=1) * (leaf * leaves) ** -0.5
    expected = by_definition(x, w.T, leaves)
    assert relative_error(expected, x.double() @ w.double().T) < 2 * BOUNDS[dtype]
    tiles = TILES if dtype == BF16 else FP32_TILES
    for tile, subtrees in zip(tiles, (1, leaves)):
        found = tree_product(x, w.T, leaves, tile=tile, subtrees=subtrees)
        assert torch.equal(found, expected), (str(tile), subtrees)
    assert torch.equal(tree_product(x[:3], w.T, leaves), expected[:3])
