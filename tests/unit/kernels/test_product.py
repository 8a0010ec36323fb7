"""Parity mode's product of many rows for Hopper, emulated: values, the order of sums, barriers.

On a GPU ``test_matrix_product.py`` compares its bits with those of all tiles.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from absorbed_mla.batch_invariant.tree import tree_sum
from tests.support import needs
from tests.support.gluon_emulation import emulated
from tests.support.hostile import amid_nan

pytest.importorskip("triton.experimental.gluon")
pytestmark = [pytest.mark.no_cover, pytest.mark.skipif(needs.HAS_GPU, reason="a GPU runs them")]

from absorbed_mla.kernels.hopper import product  # noqa: E402

BF16, FP16 = torch.bfloat16, torch.float16
# A tile is 128 x 256: rows and columns that do not fill the last ones.
ROWS, COLUMNS = 200, 312
# Summands of a part, and of a sum of three, whose last step they do not fill.
PART, SUMMANDS = 128, 328
# Sums with it are rounded to even integers.
LARGE = 2**24


def operands(
    rows: int, columns: int, summands: int, dtype=BF16, part: int = PART
) -> tuple[Tensor, Tensor]:
    """Integers whose parts are exact in fp32, however they are summed, but not their sums.

    Of several parts the first one is ``LARGE`` alone and the last ones are minus that.
    """
    generator = torch.Generator().manual_seed(rows)
    left, right = (
        torch.randint(-3, 4, shape, generator=generator).to(dtype)
        for shape in ((rows, summands), (summands, columns))
    )
    if summands > part:
        last = (summands - 1) // part * part
        left[:, :part] = left[:, last:] = 0
        left[:, 0], left[:, last], right[[0, last]] = 4096, -4096, 4096
    return amid_nan(left), amid_nan(right.T.contiguous()).T


def expected(left: Tensor, right: Tensor, bias: Tensor | None, part: int = PART) -> Tensor:
    """By definition."""
    total = torch.zeros(len(left), right.shape[1])
    for rows, columns in zip(left.split(part, 1), right.split(part)):
        total += (rows.double() @ columns.double()).float()
    return (total if bias is None else total + bias.float()).to(left.dtype)


def run(
    left: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    part: int = PART,
    stages: int = 4,
    seed: int = 0,
) -> Tensor:
    """The result, beside which nothing is written."""
    result = amid_nan(torch.full((len(left), right.shape[1]), torch.nan, dtype=left.dtype))
    assert product.can_multiply(left, right, bias, result)
    with emulated(product, "multiply_rows", "product_kernel", seed):
        product.multiply(left, right, bias, result, part, stages)
    assert result._base.isnan().sum() == result._base.numel() - result.numel()
    return result


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("summands", [8, 64, PART, PART + 8, 2 * PART, SUMMANDS])
@pytest.mark.parametrize("biased", [False, True])
def test_order_of_sums(summands, biased, dtype):
    left, right = operands(ROWS, COLUMNS, summands, dtype)
    bias = torch.arange(COLUMNS).to(dtype) if biased else None
    assert torch.equal(run(left, right, bias), expected(left, right, bias))


def test_the_comparison_can_fail():
    left, right = operands(3, 8, SUMMANDS)
    exact = (left.double() @ right.double()).to(BF16)
    assert not torch.equal(expected(left, right, None), exact)


@pytest.mark.parametrize("which", ["left", "right", "both"])
@pytest.mark.parametrize("summands", [PART, SUMMANDS])
def test_operands_that_lie_the_other_way(which, summands):
    """As in gradients of inputs and of weights."""
    left, right = operands(ROWS, COLUMNS, summands)
    if which != "right":
        left = amid_nan(left.T.contiguous()).T
    if which != "left":
        right = amid_nan(right.contiguous())
    assert torch.equal(run(left, right), expected(left, right, None))


@pytest.mark.parametrize("programs", [1, 2, 40])
@pytest.mark.parametrize(("rows", "columns"), [(2 * 128, 2 * 256), (17 * 128, 8), (8, 3 * 256)])
def test_every_tile_is_computed_once(rows, columns, programs, monkeypatch):
    """Where there are more groups of tiles than one, too."""
    monkeypatch.setattr(product, "processors", lambda device: programs)
    left, right = operands(rows, columns, SUMMANDS)
    assert torch.equal(run(left, right), expected(left, right, None))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("summands", [64, 128, 136])
@pytest.mark.parametrize("stages", [3, 4])
def test_any_order_of_roles_and_copies(summands, stages, seed, monkeypatch):
    """Of parts of one step, after which the results of the tile before may still be leaving."""
    monkeypatch.setattr(product, "processors", lambda device: 1)
    left, right = operands(300, 600, summands, part=64)
    found = run(left, right, None, 64, stages, seed)
    assert torch.equal(found, expected(left, right, None, 64))


def test_values():
    """Of any numbers."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(200, 200, generator=generator).bfloat16() for _ in range(2))
    exact = left.double() @ right.double()
    assert (run(left, right).double() - exact).norm() < 4e-3 * exact.norm()


def test_what_it_cannot_multiply():
    """Other dtypes, what no tensor map describes, and a bias that differs from row to row."""
    left, right, result = torch.zeros(8, 16), torch.zeros(16, 24), torch.zeros(8, 24)
    assert not product.can_multiply(left, right, None, result)
    left, right, narrow = left.bfloat16(), right.bfloat16(), result.bfloat16()
    bias = torch.zeros(24)
    assert product.can_multiply(left, right, bias, narrow)
    assert product.can_multiply(left, right, bias[None], narrow)
    assert not product.can_multiply(left, right, result, narrow)
    assert not product.can_multiply(left, right, bias[:1], narrow)
    assert not product.can_multiply(left, right, None, result)
    assert not product.can_multiply(left[:, :0], right[:0], None, narrow)
    assert not product.can_multiply(left[:, ::2], right[::2], None, narrow)
    assert not product.can_multiply(left, right[:, :20].contiguous().T[:20].T, None, narrow[:, :20])


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize(("leaves", "runs"), [(2, 1), (2, 2), (4, 1), (8, 2), (32, 1)])
def test_tree(leaves, runs, fp32, monkeypatch):
    """Of leaves of which every other one is large, so that their order is seen."""
    monkeypatch.setattr(product, "processors", lambda device: 2)
    left, right = operands(ROWS, COLUMNS, 64 * leaves, part=64)
    for leaf in range(0, leaves, 2):
        left[:, leaf * 64 : (leaf + 1) * 64] = 0
        left[:, leaf * 64], right[leaf * 64] = 4096 * (1 - leaf % 4), 4096 * (1 + leaf)
    if fp32:  # contiguous
        result = torch.full((ROWS + 2, COLUMNS), torch.nan)[1:-1]
    else:
        result = amid_nan(torch.full((ROWS, COLUMNS), torch.nan, dtype=BF16))
    with emulated(product, "multiply_leaves", "tree_product_kernel"):
        product.multiply_by_tree(left, right, result, leaves, runs, 4)
    assert result._base.isnan().sum() == result._base.numel() - result.numel()
    leaf = torch.arange(leaves)
    order = leaf % runs * (leaves // runs) + leaf // runs
    products = [
        (a.double() @ b.double()).float() for a, b in zip(left.split(64, 1), right.split(64))
    ]
    assert torch.equal(result, tree_sum([products[one] for one in order]).to(result.dtype))
    if leaves > 4:
        assert not torch.equal(sum(products), tree_sum(products)), "any order would do"
