"""Parity mode's matrix product: bits that no number of rows and no tile changes, values, strides.

In Triton's interpreter without a GPU.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.support import needs
from tests.support.backends import multiply_in_one_order, triton_interpreter
from tests.support.combinations import grid
from tests.support.numerics import random, relative_error

with triton_interpreter():
    from absorbed_mla.kernels.invariant import matrix_product as kernel
    from absorbed_mla.kernels.invariant import tiles as invariant_tiles
    from absorbed_mla.kernels.invariant.matrix_product import matrix_product
    from absorbed_mla.kernels.invariant.tiles import (
        FP32_TILES,
        PART,
        TILES,
        WIDE_TILE,
        is_wide_faster,
        part_length,
        tile_for,
    )

pytestmark = pytest.mark.usefixtures("interpreted")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
bf16 = partial(random, dtype=BF16)
# Of the result's rounding, and in fp32 of a sum of 2048, each added to the ones before.
BOUNDS = {BF16: 4e-3, FP16: 5e-4, FP32: 5e-6}
# More than one tile of columns and three parts of several steps, the last ones not full.
ROWS, SUMMANDS, COLUMNS = 70, 300, 130
SMALL_PART = 128
dtypes = pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: str(dtype)[6:])


@pytest.fixture
def small_parts(monkeypatch):
    """Several parts of few summands."""
    monkeypatch.setattr(kernel, "PART", SMALL_PART)


class TestBits:
    @pytest.fixture(autouse=True)
    def _one_order(self, monkeypatch, small_parts):
        multiply_in_one_order(monkeypatch)

    @pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
    def test_of_all_numbers_of_rows(self, dtype, monkeypatch):
        """Alone, at other places, and in as many rows as take another tile."""
        monkeypatch.setattr(invariant_tiles, "_ENOUGH", 1)
        x, w = random(ROWS, SUMMANDS, dtype=dtype), random(40, SUMMANDS, dtype=dtype, seed=1)
        whole = matrix_product(x, w.T)
        for first, count in ((0, 1), (3, 1), (0, 7), (0, 16), (3, 17), (0, 64), (3, 65)):
            rows = slice(first, first + count)
            assert torch.equal(matrix_product(x[rows], w.T), whole[rows]), (first, count)

    @grid(1, {"tile": [*TILES, *FP32_TILES], "split": [False, True]})
    def test_of_all_tiles(self, tile, split):
        """Parts in one program and in several, which a second kernel adds."""
        dtype = FP32 if tile in FP32_TILES else BF16
        x, w = random(ROWS, SUMMANDS, dtype=dtype), random(COLUMNS, SUMMANDS, dtype=dtype, seed=1)
        bias = random(COLUMNS, dtype=dtype, seed=2)
        expected = matrix_product(x, w.T, bias)
        assert torch.equal(matrix_product(x, w.T, bias, tile=tile, split=split), expected)

    @pytest.mark.parametrize("rows", [3, ROWS])
    def test_of_the_last_tiles(self, rows):
        """Parts have programs in these only: here in those of one column of tiles, of five."""
        tile = replace(TILES[-1], few=0, at_once=4 * -(-rows // 64))
        x, w, bias = bf16(rows, SUMMANDS), bf16(COLUMNS, SUMMANDS, seed=1), bf16(COLUMNS)
        assert tile.in_parts(rows, COLUMNS, 3) == tile.row_tiles(rows)
        for added in (None, bias):
            expected = matrix_product(x, w.T, added, split=False)
            assert torch.equal(matrix_product(x, w.T, added, tile=tile), expected)

    def test_of_many_parts(self):
        """More than are loaded together."""
        x, w = random(2, 10 * SMALL_PART, dtype=FP32), random(10 * SMALL_PART, 33, dtype=FP32)
        assert torch.equal(matrix_product(x, w, split=True), matrix_product(x, w, split=False))

    def test_the_comparison_can_fail(self, monkeypatch):
        """Sums in other parts have other bits."""
        x, w = random(ROWS, SUMMANDS, dtype=FP32), random(COLUMNS, SUMMANDS, dtype=FP32, seed=1)
        expected = matrix_product(x, w.T)
        monkeypatch.setattr(kernel, "PART", SUMMANDS)
        assert not torch.equal(matrix_product(x, w.T), expected)


class TestValues:
    @dtypes
    def test_with_a_bias(self, dtype):
        """Of one row of numbers and of a whole matrix."""
        x, w = random(5, SUMMANDS, dtype=dtype), random(SUMMANDS, 40, dtype=dtype, seed=1)
        for bias in (random(40, dtype=dtype), random(5, 40, dtype=dtype), random(5, 1, dtype=FP32)):
            found = matrix_product(x, w, bias)
            assert found.dtype == dtype
            expected = bias.double() + x.double() @ w.double()
            assert relative_error(found, expected) < BOUNDS[dtype]

    @pytest.mark.parametrize("split", [False, True])
    def test_of_parts(self, split):
        x, w = random(2, 2 * PART + 100, dtype=FP32), random(2 * PART + 100, 33, dtype=FP32, seed=1)
        for bias in (None, random(33, dtype=FP32)):
            found = matrix_product(x, w, bias, split=split)
            expected = x.double() @ w.double() + (0 if bias is None else bias)
            assert relative_error(found, expected) < BOUNDS[FP32]

    def test_in_another_dtype(self):
        """What is summed in fp32 is not rounded before."""
        x, w = bf16(3, SUMMANDS), bf16(SUMMANDS, 40, seed=1)
        found = matrix_product(x, w, dtype=FP32)
        assert found.dtype == FP32
        assert relative_error(found, x.double() @ w.double()) < BOUNDS[FP32]

    # Of 80 rows, which gradients of weights load in vectors, and of 70.
    @grid(1, {"layout": ["rows", "columns", "slices", "expanded"], "rows": [70, 80]})
    def test_of_strides(self, layout, rows):
        """Operands are read where they are."""
        x, w = bf16(rows, SUMMANDS), bf16(SUMMANDS, COLUMNS, seed=1)
        views = {
            "rows": lambda t: t,
            "columns": lambda t: t.T.contiguous().T,
            "slices": lambda t: torch.cat((t, t), 1)[:, ::2],
            "expanded": lambda t: t[:, :1].expand_as(t),
        }
        left, right = views[layout](x), views[layout](w)
        expected = left.double() @ right.double()
        assert relative_error(matrix_product(left, right), expected) < BOUNDS[BF16]

    @pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 4, 0)])
    def test_of_nothing(self, shape):
        rows, summands, columns = shape
        found = matrix_product(bf16(rows, summands), bf16(summands, columns), bf16(columns))
        assert torch.equal(found, bf16(columns).expand(rows, columns))


class TestTiles:
    """Which one is taken: enough programs, and wide ones where rows are read again."""

    def test_one_tile_with_enough_programs(self):
        few, some, many = (tile_for(rows, 36864, 4, BF16) for rows in (1, 32, 4096))
        assert few.columns < some.columns and some.rows < many.rows
        narrow = tile_for(1, 576, 4, BF16)
        assert narrow == TILES[-1] and narrow.count(1, 576) == 18

    @pytest.mark.parametrize(
        ("summands", "columns", "expected"),
        [(18432, 7168, 9216), (16500, 8448, 8256), (4096, 7168, PART), (16384, 8449, PART)],
    )
    def test_lengths_of_parts(self, summands, columns, expected):
        assert part_length(summands, columns) == expected

    @pytest.mark.parametrize(
        ("rows", "columns", "parts", "expected"),
        [
            (128, 36864, 4, 24),  # 288 tiles, which an H200 does in two turns and a bit
            (32, 36864, 4, 24),
            (256, 18432, 4, 24),  # two rows of 144 tiles
            (128, 36864, 1, 0),
            (128, 24576, 4, 60),
            (128, 24576 + 1024, 4, 0),  # of 200 tiles the last 68 are more than half of a turn
            (128, 7168, 9, 56),  # all
            (4096, 36864, 4, 0),
        ],
    )
    def test_the_last_ones_in_parts(self, rows, columns, parts, expected):
        assert tile_for(rows, columns, parts, BF16).in_parts(rows, columns, parts) == expected

    @pytest.mark.parametrize(
        ("rows", "columns", "parts", "expected"),
        [
            (1, 7168, 2, "64x64x4x5"),  # 224 programs
            (64, 7168, 1, "64x64x4x5"),  # 112
            (128, 7168, 2, "128x128x8x4"),  # 448 would be too many for a turn
            (128, 2112, 4, "64x64x4x5"),  # 264
            (1, 576, 4, "64x32x4x5"),  # 36 would leave some idle
            (1, 24576, 1, "64x64x4x4"),  # 384
        ],
    )
    def test_two_programs_for_each_multiprocessor(self, rows, columns, parts, expected):
        assert str(tile_for(rows, columns, parts, BF16)) == expected

    @pytest.mark.parametrize(
        ("rows", "columns", "parts", "expected"),
        [
            (8192, 7168, 4, True),
            (1024, 7168, 2, True),  # 224 tiles, two turns; of 128 columns 448, more than three
            (8192, 576, 4, True),  # two turns, with a quarter of the third tile of columns
            (2048, 576, 4, False),  # of 128 columns 80, all in parts
            (1024, 2112, 4, False),  # 72, and of 128 columns 136, the last ones in parts
            (1024, 24576, 1, True),
            (256, 36864, 4, False),
            (16384, 64, 4, False),
        ],
    )
    def test_wide_ones_of_many_rows(self, rows, columns, parts, expected):
        assert is_wide_faster(rows, columns, parts) == expected

    def test_all_tiles_sum_in_one_order(self):
        """Warp-group instructions need 64 rows and 4 warps."""
        assert all(t.rows % 64 == t.num_warps % 4 == 0 for t in TILES)
        assert tile_for(4096, 4096, 1, FP32) is FP32_TILES[0]
        assert tile_for(128, 256, 4, FP32) is FP32_TILES[1]


class TestWideTile:
    """The kernel for Hopper, emulated; alone it is tested in ``test_product.py``."""

    @pytest.fixture
    def emulated_kernel(self):
        pytest.importorskip("triton.experimental.gluon")
        from absorbed_mla.kernels.hopper import product
        from tests.support.gluon_emulation import emulated

        with emulated(product, "multiply_rows", "product_kernel"):
            yield

    @needs.no_gpu
    @pytest.mark.no_cover
    @pytest.mark.parametrize("transposed", [False, True])
    def test_bits(self, transposed, small_parts, emulated_kernel):
        """Of parts that are exact, so that their order alone is seen."""
        x, w = (
            torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(0)).to(BF16)
            for shape in ((ROWS, 304), (136, 304))
        )
        x[:, :SMALL_PART], x[:, 2 * SMALL_PART :] = 0, 0
        x[:, 0], x[:, 2 * SMALL_PART], w[:, [0, 2 * SMALL_PART]] = 4096, -4096, 4096
        bias = bf16(136)
        right = w.T.contiguous() if transposed else w.T
        found = matrix_product(x, right, bias, tile=WIDE_TILE)
        assert torch.equal(found, matrix_product(x, right, bias, tile=TILES[0], split=False))

    @pytest.mark.parametrize("chosen", [False, True])
    def test_is_chosen(self, chosen, monkeypatch):
        """Where it is faster and can multiply them, unless another is asked for."""
        pytest.importorskip("triton.experimental.gluon")
        monkeypatch.setattr(kernel, "has_wide_tile", lambda device: True)
        monkeypatch.setattr(kernel, "is_wide_faster", lambda *sizes: chosen)
        calls = []
        monkeypatch.setattr(kernel, "_multiply_wide", lambda *args: calls.append(args))
        x, w = bf16(3, 64), bf16(8, 64, seed=1)
        matrix_product(x, w.T)
        assert len(calls) == chosen
        for others in ({"tile": TILES[-1]}, {"split": False}, {"dtype": FP32}):
            matrix_product(x, w.T, **others)
        matrix_product(x[:, 1:], w[:, 1:].T)
        assert len(calls) == chosen

    def test_refuses_what_it_cannot_multiply(self):
        pytest.importorskip("triton.experimental.gluon")
        with pytest.raises(AssertionError, match="not for this tile"):
            matrix_product(bf16(3, 64), bf16(64, 8), dtype=FP32, tile=WIDE_TILE)


@needs.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("summands", "columns"), [(7168, 576), (1536, 3072), (18432, 1024)])
def test_bits_on_a_gpu(dtype, summands, columns):
    """At widths of DeepSeek-V3, of every tile, in parts and whole."""
    x = random(300, summands, dtype=dtype)
    w = random(columns, summands, dtype=dtype, seed=1) * summands**-0.5
    whole = matrix_product(x, w.T)
    assert relative_error(whole, x.double() @ w.double().T) < 2 * BOUNDS[dtype]
    for rows in (1, 8, 16, 17, 64, 65, 128, 299):
        assert torch.equal(matrix_product(x[:rows], w.T), whole[:rows]), rows
    for tile in TILES if dtype != FP32 else (*FP32_TILES, replace(FP32_TILES[0], rows=64)):
        last = replace(tile, few=0, at_once=max(2, tile.count(130, columns) - 1))
        found = matrix_product(x[:130], w.T, tile=last)
        assert torch.equal(found, whole[:130]), f"{tile}, the last ones in parts"
        for split in (False, True):
            found = matrix_product(x[:130], w.T, tile=tile, split=split)
            assert torch.equal(found, whole[:130]), (str(tile), split)


@needs.hopper
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("rows", "summands", "columns"),
    [
        (1024, 1536, 6144),
        (1000, 7168, 2112),  # four parts
        (1500, 4104, 5640),  # two
        (77, 2056, 264),  # the second of one step, which summands do not fill
        (4096, 136, 16392),
    ],
)
def test_bits_of_the_wide_tile_on_a_gpu(rows, summands, columns, dtype):
    """Those of another tile, of operands that lie as in a product and as in its gradients."""
    x = random(rows, summands, dtype=dtype)
    w = random(columns, summands, dtype=dtype, seed=1) * summands**-0.5
    bias = random(columns, dtype=dtype, seed=2)
    rows_apart, columns_apart = x.T.contiguous().T, w.T.contiguous()
    for added in (None, bias):
        expected = matrix_product(x, w.T, added, tile=TILES[1], split=False)
        for stages in (3, 4):
            tile = replace(WIDE_TILE, num_stages=stages)
            for left, right in itertools.product((x, rows_apart), (w.T, columns_apart)):
                if left.stride(1) != 1 and rows % 8:
                    continue
                found = matrix_product(left, right, added, tile=tile)
                assert torch.equal(found, expected), (stages, left.stride(), right.stride())
    assert torch.equal(matrix_product(x, w.T, bias), expected)
