"""Fuzz families of the expanded form's attention on Hopper, and of the search for max logits."""

from __future__ import annotations

import math
from functools import partial

import torch

from absorbed_mla.core_attention.latent_kernels import key_tile_table
from absorbed_mla.core_attention.latent_kernels import query_tile_table as whole_table
from absorbed_mla.core_attention.max_logits_search import query_tile_table
from absorbed_mla.kernels import operators
from checks.fuzz.compare import Comparison
from checks.fuzz.draw import BF16, FP16, FP32, Draw
from checks.fuzz.family import Config, family
from checks.fuzz.references import attention, attention_gradients, beside_sink, sink_gradient
from checks.fuzz.spans import draw_spans, hide_unseen, visible, with_offsets

_PAIRS = 2**22
_TILE = 128
_HOPPER = "kernels.hopper"
_FORWARD = f"{_HOPPER}.multi_head_kernel.attend_multi_head"


def _operands(config: Config, draw: Draw):
    """Spans, and queries, keys and values: as drawn, and as kernels get them."""
    batch = draw.choice(1, 1, 2, 3)
    most = min(draw.limit(900, 40), math.isqrt(_PAIRS // (config.heads * batch)))
    queries, keys, spans = draw_spans(draw, most, _TILE, 64, 16)
    normal = partial(draw.normal, dtype=config.dtype)
    shape = batch, config.heads
    drawn = (
        normal(queries, *shape, config.width, magnitude=draw.often(1.0, 2.0, 4.0)),
        normal(keys, *shape, config.width),
        normal(keys, *shape, config.values),
    )
    hidden = (
        draw.amid_nan(hide_unseen(x, spans, of_keys=is_key))
        for x, is_key in zip(drawn, (False, True, True))
    )
    return spans, drawn, tuple(hidden)


def _run(config: Config, draw: Draw, compare: Comparison, *, backward: bool) -> None:
    config.values = config.choice(64, 128)
    config.heads = config.choice(1, 2, 3, 5, 8, 16, config.integer(1, 40))
    config.dtype, config.record = config.choice(BF16, BF16, FP16), config.flag(0.3)
    config.windowed, config.sinks = config.flag(0.3), config.flag(0.3)
    spans, drawn, hidden = _operands(config, draw)
    q, k, _ = hidden
    scale = draw.often(1.0, 0.3) * config.width**-0.5
    window = draw.length(1024, _TILE, 64, least=1) if config.windowed else None
    spans = with_offsets(spans) if config.windowed else spans
    tiles = whole_table(spans, _TILE, len(q), q.device, window)
    sink = None
    if config.sinks:
        magnitude = draw.often(1.0, 4.0, 16.0)
        sink = draw.normal(config.heads, dtype=draw.choice(config.dtype, FP32), magnitude=magnitude)
    given = *hidden, tiles, scale, config.record, window, sink
    out, lse, largest = operators.multi_head_attention_forward(*given)
    exact = [x.double() for x in drawn]
    seen = visible(spans, len(q), len(k), q.device, window)
    attended = attention(*exact, scale, seen, config.dtype)
    if sink is not None:
        attended = beside_sink(attended, sink.double())
    compare.rows("out", out, *attended.out, config.dtype)
    compare.lse(lse, attended.lse, config.dtype)
    if config.record:
        size = attended.largest.abs().nan_to_num(0.0, 0.0, 0.0)
        compare.near("largest", largest, attended.largest, 1e-4 + 1e-5 * size)
    if not backward:
        return
    grad = draw.normal(*out.shape, dtype=config.dtype)
    grad_lse = draw.normal(*lse.shape) if draw.flag() else None
    grads = [x if x is None else hide_unseen(x, spans, of_keys=False) for x in (grad, grad_lse)]
    if sink is not None:  # Every query has an LSE.
        grads[1] = grad_lse
    tables = key_tile_table(spans, _TILE, len(k), k.device, window)
    saved = *grads, out, lse, *hidden, *tables, scale, window, sink
    *found, of_sink = operators.multi_head_attention_backward(*saved)
    wanted = attention_gradients(*exact, attended, (grad, grad_lse), scale, config.dtype)
    for name, each, result in zip(("dq", "dk", "dv"), wanted, found):
        compare.rows(name, result, *each, config.dtype)
    if sink is not None:
        expected = sink_gradient(attended, (grad, grad_lse), sink.double(), config.dtype)
        compare.rows("dsink", of_sink[:, None], *expected, config.dtype)


@family(
    "expanded-hopper",
    _FORWARD,
    f"{_HOPPER}.multi_head_backward_kernel.attend_multi_head_backward",
    f"{_HOPPER}.multi_head_backward_rows._starts_kernel",
    f"{_HOPPER}.multi_head_backward_rows._query_gradient_kernel",
    hopper=True,
    share=1.5,
)
def forward_and_backward(config: Config, draw: Draw, compare: Comparison) -> None:
    """Widths that the backward has."""
    config.width = config.choice(96, 128, 192, 192)
    _run(config, draw, compare, backward=True)


@family("expanded-hopper-forward", _FORWARD, hopper=True, share=0.3)
def forward(config: Config, draw: Draw, compare: Comparison) -> None:
    """The width that has no backward."""
    config.width = 64
    _run(config, draw, compare, backward=False)


@family("largest-scores", "kernels.max_logits._largest_kernel", share=0.6)
def search(config: Config, draw: Draw, compare: Comparison) -> None:
    """Exact above the threshold; elsewhere a bound that is not above it, or what was there."""
    # Loaded where it runs: it imports Triton.
    from absorbed_mla.kernels.max_logits import QUERIES, largest_scores

    width = config.choice(16, 24, 64, 96, 128, 192, 192, 256, config.integer(1, 256))
    config.width, config.values = min(width, config.limit(256, 48)), 16
    config.heads, config.dtype = config.integer(1, config.limit(20, 3)), config.choice(BF16, FP16)
    spans, (q, k, _), (given_q, given_k, _) = _operands(config, draw)
    scale = draw.often(1.0, 0.3) * config.width**-0.5
    seen = visible(spans, len(q), len(k), q.device)
    operands = q.double(), k.double(), k.double()
    attended = attention(*operands, scale, seen, config.dtype)
    threshold = draw.choice(-math.inf, 0.0, 3.0, 100.0)
    of_heads = torch.full((config.heads,), -math.inf, device=q.device)
    lse = attended.lse.float()
    tiles = query_tile_table(spans, QUERIES, q.device)
    largest_scores(given_q, given_k, lse, of_heads, tiles, scale, threshold)
    if not attended.largest.numel():
        compare.same("largest", of_heads, torch.full_like(of_heads, -math.inf))
        return
    wanted = attended.largest.amax((0, 1))
    tolerance = 1e-4 + 1e-5 * wanted.abs().nan_to_num(0.0, 0.0, 0.0)
    found = of_heads.double()
    exact = ((found - wanted).abs() <= tolerance) | (found == wanted)
    bound = (wanted <= threshold + tolerance) & (found <= threshold + tolerance)
    bound &= (found >= wanted - tolerance) | (found == -math.inf)
    compare.holds("largest", ~(exact | bound), of_heads, wanted)
