"""Fuzz families of batch-invariant GEMMs, also per head, and of the top-k of short rows."""

from __future__ import annotations

import torch
from torch import Tensor

from checks.fuzz.compare import Comparison
from checks.fuzz.draw import BF16, FP16, FP32, Draw
from checks.fuzz.family import Config, family
from checks.fuzz.references import product

_PRODUCT = "kernels.invariant.matrix_product._product_kernel"


def _operands(config: Config, draw: Draw, rows: int):
    """Operands, of which columns lie side by side or rows do, a bias or None, and the result."""
    left = draw.normal(rows, config.summands, dtype=config.dtype)
    right = draw.normal(config.summands, config.columns, dtype=config.dtype)
    exact = product(left, right, config.result)
    bias = None
    if config.bias:
        bias = draw.normal(config.columns, dtype=draw.choice(config.dtype, FP32))
        exact = type(exact)(exact.value + bias.double(), exact.noise + bias.double().abs())
    return _laid(left, config.left_turned), _laid(right, config.right_turned), bias, exact


def _laid(x: Tensor, turned: bool) -> Tensor:
    return x.T.contiguous().T if turned else x


def _configure_operands(config: Config) -> None:
    config.bias, config.left_turned = config.flag(0.4), config.flag(0.3)
    config.right_turned = config.flag()


@family("matrix-product", _PRODUCT, "kernels.invariant.matrix_product._add_kernel")
def matrices(config: Config, draw: Draw, compare: Comparison) -> None:
    """Of any sizes and layouts."""
    from absorbed_mla.kernels.invariant.matrix_product import matrix_product

    most = config.limit(7168, 90)
    columns = config.choice(1, 256, 2048, config.length(4096, 64, 128, least=1))
    summands = config.choice(1, 512, 7168, 2048, config.length(7168, 64, 2048, least=1))
    config.columns, config.summands = min(columns, most), min(summands, most)
    config.dtype = config.choice(BF16, BF16, FP16, FP32)
    config.result = config.often(config.dtype, FP32)
    _configure_operands(config)
    rows = draw.length(draw.limit(700, 40), 16, 64, 128)
    left, right, bias, exact = _operands(config, draw, rows)
    split = draw.choice(None, None, False, True)
    found = matrix_product(left, right, bias, config.result, split=split)
    compare.rows("result", found, *exact, config.result)
    if not rows:
        return
    which = draw.integer(0, rows - 1)
    own = slice(which, min(rows, which + draw.choice(1, 20)))
    alone = matrix_product(left[own], right, bias, config.result)
    compare.same("rows alone", alone, found[own])


@family(
    "matrix-product-hopper", "kernels.hopper.product_kernel.multiply_rows", _PRODUCT, hopper=True
)
def wide_tiles(config: Config, draw: Draw, compare: Comparison) -> None:
    """The tile of many rows, of any number, which has the bits of the others."""
    from absorbed_mla.kernels.hopper.product import can_multiply
    from absorbed_mla.kernels.invariant.matrix_product import matrix_product
    from absorbed_mla.kernels.invariant.tiles import WIDE_TILE

    # What tensor maps describe: rows begin at multiples of 16 bytes.
    config.columns = 8 * config.length(512, 32, 16, least=1)
    config.summands = 8 * config.choice(64, 256, 896, config.length(896, 8, 256, least=1))
    config.dtype = config.result = config.choice(BF16, BF16, FP16)
    _configure_operands(config)
    # Turned operands have rows of so many numbers.
    rows = 8 * draw.length(draw.limit(200, 8), 16, 32, least=1)
    if not config.left_turned:
        rows -= draw.integer(0, 7)
    left, right, bias, exact = _operands(config, draw, rows)
    result = torch.empty(rows, config.columns, dtype=config.result, device=left.device)
    assert can_multiply(left, right, bias, result), "drawn so that it can"
    found = matrix_product(left, right, bias, tile=WIDE_TILE)
    compare.rows("result", found, *exact, config.result)
    compare.same("as other tiles", matrix_product(left, right, bias, split=False), found)


@family(
    "tree-product",
    "kernels.invariant.tree_product._tree_product_kernel",
    "kernels.invariant.tree_product._add_kernel",
    _PRODUCT,
)
def trees(config: Config, draw: Draw, compare: Comparison) -> None:
    """Sums by a tree, of any tile, number of subtrees and rows: the bits of leaf after leaf."""
    from absorbed_mla.kernels.invariant.tree_product import TILES, tree_product

    config.dtype = config.choice(BF16, BF16, FP16, FP32)
    left, right, found = _sum_by_tree(config, draw, compare, config.integer(1, 200))
    if not len(found):
        return
    which = draw.integer(0, len(found) - 1)
    some = slice(which, which + draw.choice(1, 20, 130))
    more = {
        "tile": draw.choice(*TILES) if config.dtype != FP32 else None,
        "subtrees": max(config.leaves // 8, draw.choice(1, config.leaves // 2, config.leaves)),
    }
    order = config.leaves, config.runs, config.result
    compare.same("rows alone", tree_product(left[some], right, *order, **more), found[some])


@family(
    "tree-product-hopper",
    "kernels.hopper.tree_product_kernel.multiply_leaves",
    _PRODUCT,
    hopper=True,
)
def wide_trees(config: Config, draw: Draw, compare: Comparison) -> None:
    """The tile of many rows, of any number."""
    from absorbed_mla.kernels.invariant.tree_product import WIDE_TILE

    config.dtype = config.choice(BF16, BF16, FP16)
    _sum_by_tree(config, draw, compare, 64 * config.integer(1, 20), tile=WIDE_TILE)


def _sum_by_tree(config: Config, draw: Draw, compare: Comparison, leaf: int, **more):
    """Operands and the product, which has the bits of leaf after leaf."""
    from absorbed_mla.batch_invariant.tree import tree_sum
    from absorbed_mla.kernels.invariant.matrix_product import matrix_product
    from absorbed_mla.kernels.invariant.tree_product import tree_product

    config.columns = min(8 * config.length(512, 32, 16, least=1), config.limit(4096, 64))
    config.leaves = config.choice(2, 4, 8, 16, 32)
    config.summands, config.runs = config.leaves * leaf, config.choice(1, 2)
    config.result = config.often(config.dtype, FP32)
    _configure_operands(config)
    config.bias = False
    rows = 8 * draw.length(draw.limit(90, 5), 16)
    left, right, _, exact = _operands(config, draw, rows)
    found = tree_product(left, right, config.leaves, config.runs, config.result, **more)
    compare.rows("result", found, *exact, config.result)
    run = config.leaves // config.runs
    order = [i % config.runs * run + i // config.runs for i in range(config.leaves)]
    lefts, rights = left.split(leaf, 1), right.split(leaf)
    sums = [matrix_product(lefts[i], rights[i], dtype=FP32, part=2**20) for i in order]
    compare.same("leaf after leaf", tree_sum(sums).to(config.result), found)
    return left, right, found


@family("head-product", "kernels.invariant.product._head_product_kernel")
def matrices_of_heads(config: Config, draw: Draw, compare: Comparison) -> None:
    """Each head's rows by its matrix."""
    from absorbed_mla.kernels.invariant.product import head_product

    most = config.limit(600, 70)
    summands, outputs = (
        min(most, config.choice(128, 512, config.length(600, 32, 64, least=1))) for _ in range(2)
    )
    config.summands, config.outputs = summands, outputs
    heads = min(config.choice(1, 16, config.integer(1, 130)), config.limit(130, 4))
    config.heads, config.dtype = heads, config.choice(BF16, FP16, FP32)
    tokens, dtype = draw.length(draw.limit(300, 70), 64), config.dtype
    x = draw.normal(tokens, heads, summands, dtype=dtype)
    weight = draw.normal(heads, summands, outputs, dtype=dtype)
    exact = product(x.transpose(0, 1), weight, dtype)
    given = draw.amid_nan(x)
    if draw.flag():
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    found = head_product(given, weight)
    compare.rows("result", found, *(part.transpose(0, 1) for part in exact), dtype)
    if tokens:
        which = draw.integer(0, tokens - 1)
        own = slice(which, which + 1)
        compare.same("a token alone", head_product(given[own], weight), found[own])


@family("row-topk", "kernels.invariant.row_topk._topk_kernel", share=0.5)
def first_of_rows(config: Config, draw: Draw, compare: Comparison) -> None:
    """Exactly, with ties, infinities, NaN and -0."""
    from absorbed_mla.kernels.invariant.row_topk import row_topk

    columns = config.choice(1, 8, 64, 256, 512, config.integer(1, 512))
    columns = config.columns = min(columns, config.limit(512, 40))
    number = config.number = min(columns, config.choice(1, 2, 8, 32, config.integer(1, 32)))
    config.largest, config.dtype = config.flag(0.8), config.choice(BF16, FP16, FP32)
    shape = draw.length(draw.limit(300, 9), 32, least=1), columns
    if draw.flag(0.3):
        shape = draw.integer(1, 3), *shape
    x = draw.normal(*shape, dtype=config.dtype)
    if draw.flag():
        x = (x * 2).round() / 2
        for value in (torch.nan, torch.inf, -torch.inf, -0.0):
            x[draw.uniform(*shape) < 0.05] = value
    given = x.transpose(-1, -2).contiguous().transpose(-1, -2) if draw.flag(0.3) else x
    values, indices = row_topk(given, number, config.largest)
    ordered = torch.sort(x.double(), dim=-1, descending=config.largest, stable=True)
    compare.same("indices", indices, ordered.indices[..., :number])
    compare.same("values", values, x.gather(-1, ordered.indices[..., :number]))
