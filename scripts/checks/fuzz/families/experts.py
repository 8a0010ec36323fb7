"""Experts: the order of tokens by expert, products of their rows, activation, sums."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from checks.fuzz.compare import Comparison
from checks.fuzz.draw import BF16, FP16, FP32, Draw
from checks.fuzz.family import Family
from checks.fuzz.references import product, rounded_sum

_NUMBERS = 2**25


class OrderConfig(NamedTuple):
    """Experts of a token, of this rank, and the first of them."""

    topk: int
    count: int
    first: int


def _order_config(draw: Draw) -> OrderConfig:
    count = draw.choice(1, 8, 64, 256, draw.integer(1, 300))
    return OrderConfig(draw.integer(1, 10), count, draw.choice(0, 0, draw.integer(1, 300)))


def _order(config: OrderConfig, draw: Draw, compare: Comparison) -> None:
    from absorbed_mla.kernels.moe.order import order_by_expert

    tokens = draw.length(draw.limit(9000, 120) // config.topk, 16, 64, least=1)
    end = draw.choice(config.first + config.count, config.first + 2 * config.count, 1)
    chosen = draw.integers(end, tokens, config.topk)
    choices, rows, places, ends = order_by_expert(chosen, config.count, config.first)
    own = chosen.flatten() - config.first
    own = own.where((own >= 0) & (own < config.count), config.count)
    order = own.sort(stable=True).indices
    compare.same("choices", choices, order)
    compare.same("tokens", rows, order // config.topk)
    wanted = torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=order.device)
    )
    compare.same("places", places, wanted.view_as(chosen))
    counts = own.bincount(minlength=config.count + 1)[: config.count]
    compare.same("ends", ends, counts.cumsum(0).int())


class SumConfig(NamedTuple):
    """Width of a row, experts of a token, and how sums are rounded."""

    width: int
    topk: int
    one_by_one: bool
    dtype: torch.dtype


def _sum_config(draw: Draw) -> SumConfig:
    width = draw.choice(1, 512, 7168, draw.length(draw.limit(4000, 90), 1024, 64, least=1))
    width = min(width, draw.limit(8000, 90))
    return SumConfig(width, draw.integer(1, 10), draw.flag(), draw.choice(BF16, FP16, FP32))


def _sums(config: SumConfig, draw: Draw, compare: Comparison) -> None:
    """In the order of the choices, rounded once; or of the rows, rounded after each."""
    from absorbed_mla.kernels.moe.sums import summed

    tokens = draw.length(draw.limit(200, 8), 16)
    count = tokens * config.topk
    rows = draw.normal(count, config.width, dtype=config.dtype)
    places = torch.argsort(draw.uniform(count)).view(tokens, config.topk)
    last = draw.choice(count, draw.integer(0, count))
    rows[last:] = torch.nan
    ends = draw.integer_tensor([*sorted(draw.integer(0, last) for _ in range(3)), last])
    found = summed(rows, places, ends, one_by_one=config.one_by_one)
    if config.one_by_one:
        ordered = places.sort(-1).values
        total = torch.zeros(tokens, config.width, device=rows.device)
        for place in ordered.unbind(-1):
            part = rows[place].float().where((place < last)[:, None], 0.0)
            total = (total + part).to(config.dtype).float()
        compare.same("sums", found, total.to(config.dtype))
        return
    taken = rows.double()[places].where((places < last)[..., None], 0.0)
    squares, value = taken.square().sum(1), taken.sum(1)
    compare.rows("sums", found, value, rounded_sum(value, squares, 1, config.dtype), config.dtype)


class GateConfig(NamedTuple):
    """Width of the gate, and how its products are rounded."""

    width: int
    rounds_each_step: bool
    routed: bool
    dtype: torch.dtype
    probs: torch.dtype


def _gate_config(draw: Draw) -> GateConfig:
    width = draw.choice(1, 2048, 1536, draw.length(draw.limit(4000, 90), 1024, 2048, least=1))
    width = min(width, draw.limit(5000, 90))
    dtype = draw.choice(BF16, BF16, FP16, FP32)
    return GateConfig(width, draw.flag(), draw.flag(0.7), dtype, draw.choice(FP32, dtype))


def _gate(config: GateConfig, draw: Draw, compare: Comparison) -> None:
    from absorbed_mla.kernels.moe.swiglu import gated, swiglu

    tokens, topk = draw.length(draw.limit(200, 8), 16), draw.integer(1, 8)
    rows = tokens * topk
    both = draw.normal(rows, 2 * config.width, dtype=config.dtype, magnitude=draw.often(1.0, 4.0))
    gate, up = both.double().chunk(2, -1)
    wanted, last = torch.nn.functional.silu(gate) * up, rows
    if config.routed:
        probs = draw.uniform(tokens, topk).to(config.probs)
        choices = torch.argsort(draw.uniform(rows))
        last = draw.choice(rows, draw.integer(0, rows))
        ends = draw.integer_tensor([draw.integer(0, last), last])
        found = swiglu(both, probs, choices, ends, rounds_each_step=config.rounds_each_step)
        wanted = wanted * probs.double().flatten()[choices][:, None]
    else:
        found = gated(both, rounds_each_step=config.rounds_each_step)
    roundings = 3 if config.rounds_each_step else 1
    wanted = wanted[:last]
    compare.rows("rows", found[:last], wanted, wanted.abs() * roundings, config.dtype)


class ProductConfig(NamedTuple):
    """Experts, columns and summands of a product, and whether rows are taken from others."""

    experts: int
    columns: int
    summands: int
    taken: bool
    dtype: torch.dtype


def _product_config(draw: Draw) -> ProductConfig:
    most = draw.limit(4096, 90)
    columns = draw.choice(64, 512, 2048, draw.length(2048, 64, 128, least=1))
    summands = draw.choice(64, 512, 2048, 4096, draw.length(4500, 64, 128, 2048, least=1))
    experts = draw.choice(1, 3, 8, 16, draw.integer(1, 40))
    dtype = draw.choice(BF16, BF16, FP16, FP32)
    columns, summands = min(columns, most), min(summands, most)
    experts = max(1, min(experts, _NUMBERS // (columns * summands), draw.limit(64, 4)))
    return ProductConfig(experts, columns, summands, draw.flag(), dtype)


class _Rows(NamedTuple):
    """What a grouped product is called with, and rows with their weights for the reference."""

    x: Tensor
    weights: Tensor
    ends: Tensor
    tokens: Tensor | None
    rows: Tensor
    ends_list: list[int]


def _draw_rows(config: ProductConfig, draw: Draw) -> _Rows:
    most = draw.limit(300, 12)
    lengths = [draw.choice(0, draw.length(most, 16, 64), 1) for _ in range(config.experts)]
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    count = ends[-1] + draw.choice(0, draw.integer(0, 5))
    weights = draw.normal(config.experts, config.columns, config.summands, dtype=config.dtype)
    if config.taken:
        source = draw.normal(max(1, count // 2), config.summands, dtype=config.dtype)
        tokens = draw.integers(len(source), count)
        return _Rows(source, weights, draw.integer_tensor(ends), tokens, source[tokens], ends)
    rows = draw.normal(count, config.summands, dtype=config.dtype)
    return _Rows(rows, weights, draw.integer_tensor(ends), None, rows, ends)


def _compare_products(config, found: Tensor, drawn: _Rows, compare: Comparison) -> None:
    for expert, (begin, end) in enumerate(zip([0, *drawn.ends_list], drawn.ends_list)):
        if begin == end:
            continue
        exact = product(drawn.rows[begin:end], drawn.weights[expert].T, config.dtype)
        compare.rows(f"rows of expert {expert}", found[begin:end], *exact, config.dtype)
    compare.same("shape", torch.tensor(found.shape), torch.tensor(
        [len(drawn.rows), config.columns]
    ))  # fmt: skip


def _few_rows(config: ProductConfig, draw: Draw, compare: Comparison) -> None:
    from absorbed_mla.kernels.moe.skinny_gemm import few_rows_product

    drawn = _draw_rows(config, draw)
    if not len(drawn.rows):
        drawn = _draw_rows(config._replace(experts=1), draw)
    found = few_rows_product(*drawn[:4])
    _compare_products(config, found, drawn, compare)


def _grouped(config: ProductConfig, draw: Draw, compare: Comparison) -> None:
    """Also, an expert's rows get the bits of a matrix product of their own."""
    from absorbed_mla.kernels.invariant.grouped_product import grouped_product
    from absorbed_mla.kernels.invariant.matrix_product import matrix_product

    drawn = _draw_rows(config, draw)
    found = grouped_product(*drawn[:4])
    _compare_products(config, found, drawn, compare)
    expert = draw.integer(0, config.experts - 1)
    begin, end = [0, *drawn.ends_list][expert : expert + 2]
    alone = matrix_product(drawn.rows[begin:end], drawn.weights[expert].T)
    compare.same("rows of an expert alone", found[begin:end], alone)


_EXPERTS = "kernels.moe"
_INVARIANT = "kernels.invariant"
FAMILIES = (
    Family("expert-order", (f"{_EXPERTS}.order._order_kernel",), _order_config, _order, share=0.5),
    Family("expert-sums", (f"{_EXPERTS}.sums._sums_kernel",), _sum_config, _sums, share=0.5),
    Family("swiglu", (f"{_EXPERTS}.swiglu._swiglu_kernel",), _gate_config, _gate, share=0.5),
    Family(
        "few-rows-product",
        (f"{_EXPERTS}.skinny_gemm._few_rows_kernel",),
        _product_config,
        _few_rows,
    ),
    Family(
        "grouped-product",
        (
            f"{_INVARIANT}.grouped_product._grouped_kernel",
            f"{_INVARIANT}.matrix_product._product_kernel",
            f"{_INVARIANT}.matrix_product._add_kernel",
        ),
        _product_config,
        _grouped,
    ),
)
