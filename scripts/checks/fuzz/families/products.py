"""Products whose rows do not depend on the rows beside them, and the first of short rows."""

from __future__ import annotations

import torch
from torch import Tensor

from checks.fuzz.compare import Comparison
from checks.fuzz.draw import BF16, FP16, FP32, Draw
from checks.fuzz.family import Config, Family
from checks.fuzz.references import product


def _config(draw: Draw) -> Config:
    most = draw.limit(7168, 90)
    columns = draw.choice(1, 256, 2048, draw.length(4096, 64, 128, least=1))
    summands = draw.choice(1, 512, 7168, 2048, draw.length(7168, 64, 2048, least=1))
    dtype = draw.choice(BF16, BF16, FP16, FP32)
    result = draw.often(dtype, FP32)
    return _laid(draw, min(columns, most), min(summands, most), dtype, result)


def _laid(
    draw: Draw, columns: int, summands: int, dtype: torch.dtype, result: torch.dtype
) -> Config:
    """With or without a bias, and with operands whose columns lie side by side or whose rows do."""
    options = {"bias": draw.flag(0.4), "left_turned": draw.flag(0.3), "right_turned": draw.flag()}
    return Config(columns=columns, summands=summands, dtype=dtype, result=result, **options)


def _hopper_config(draw: Draw) -> Config:
    """What tensor maps describe: rows begin at multiples of 16 bytes."""
    columns = 8 * draw.length(512, 32, 16, least=1)
    summands = 8 * draw.choice(64, 256, 896, draw.length(896, 8, 256, least=1))
    dtype = draw.choice(BF16, BF16, FP16)
    return _laid(draw, columns, summands, dtype, dtype)


def _turned(x: Tensor, *, turned: bool) -> Tensor:
    """The same matrix, whose columns lie side by side if ``turned``."""
    return x.T.contiguous().T if turned else x


def _operands(config: Config, draw: Draw, rows: int):
    left = draw.normal(rows, config.summands, dtype=config.dtype)
    right = draw.normal(config.summands, config.columns, dtype=config.dtype)
    bias = draw.normal(config.columns, dtype=draw.choice(config.dtype, FP32))
    exact = product(left, right, config.result)
    if config.bias:
        exact = exact._replace(
            value=exact.value + bias.double(), noise=exact.noise + bias.double().abs()
        )
    left = _turned(left, turned=config.left_turned)
    return left, _turned(right, turned=config.right_turned), bias if config.bias else None, exact


def _run(config: Config, draw: Draw, compare: Comparison) -> None:
    from absorbed_mla.kernels.invariant.matrix_product import matrix_product

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


def _wide(config: Config, draw: Draw, compare: Comparison) -> None:
    """The tile of many rows, of any number, which has the bits of the others."""
    from absorbed_mla.kernels.hopper.product import can_multiply
    from absorbed_mla.kernels.invariant.matrix_product import matrix_product
    from absorbed_mla.kernels.invariant.tiles import WIDE_TILE

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


def _head_config(draw: Draw) -> Config:
    most = draw.limit(600, 70)
    summands, outputs = (
        min(most, draw.choice(128, 512, draw.length(600, 32, 64, least=1))) for _ in range(2)
    )
    heads = min(draw.choice(1, 16, draw.integer(1, 130)), draw.limit(130, 4))
    dtype = draw.choice(BF16, FP16, FP32)
    return Config(heads=heads, summands=summands, outputs=outputs, dtype=dtype)


def _heads(config: Config, draw: Draw, compare: Comparison) -> None:
    from absorbed_mla.kernels.invariant.product import head_product

    tokens, dtype = draw.length(draw.limit(300, 70), 64), config.dtype
    x = draw.normal(tokens, config.heads, config.summands, dtype=dtype)
    weight = draw.normal(config.heads, config.summands, config.outputs, dtype=dtype)
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


def _topk_config(draw: Draw) -> Config:
    columns = draw.choice(1, 8, 64, 256, 512, draw.integer(1, 512))
    columns = min(columns, draw.limit(512, 40))
    number = min(columns, draw.choice(1, 2, 8, 32, draw.integer(1, 32)))
    dtype = draw.choice(BF16, FP16, FP32)
    return Config(columns=columns, number=number, largest=draw.flag(0.8), dtype=dtype)


def _topk(config: Config, draw: Draw, compare: Comparison) -> None:
    """Exactly, with ties, infinities, NaN and -0."""
    from absorbed_mla.kernels.invariant.row_topk import row_topk

    shape = draw.length(draw.limit(300, 9), 32, least=1), config.columns
    if draw.flag(0.3):
        shape = draw.integer(1, 3), *shape
    x = draw.normal(*shape, dtype=config.dtype)
    if draw.flag():
        x = (x * 2).round() / 2
        for value in (torch.nan, torch.inf, -torch.inf, -0.0):
            x[draw.uniform(*shape) < 0.05] = value
    given = x.transpose(-1, -2).contiguous().transpose(-1, -2) if draw.flag(0.3) else x
    values, indices = row_topk(given, config.number, config.largest)
    ordered = torch.sort(x.double(), dim=-1, descending=config.largest, stable=True)
    compare.same("indices", indices, ordered.indices[..., : config.number])
    compare.same("values", values, x.gather(-1, ordered.indices[..., : config.number]))


_PRODUCT = "kernels.invariant.matrix_product._product_kernel"
FAMILIES = (
    Family(
        "matrix-product",
        (_PRODUCT, "kernels.invariant.matrix_product._add_kernel"),
        _config,
        _run,
    ),
    Family(
        "matrix-product-hopper",
        ("kernels.hopper.product_kernel.multiply_rows", _PRODUCT),
        _hopper_config,
        _wide,
        hopper=True,
    ),
    Family(
        "head-product", ("kernels.invariant.product._head_product_kernel",), _head_config, _heads
    ),
    Family(
        "row-topk", ("kernels.invariant.row_topk._topk_kernel",), _topk_config, _topk, share=0.5
    ),
)
