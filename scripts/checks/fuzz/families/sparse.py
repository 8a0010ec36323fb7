"""Fuzz families of attention over chosen keys (DSA), also cached, and of the KL target."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from absorbed_mla.dsa.cached_keys import CachedRows
from absorbed_mla.fp8_latents import Fp8Latents
from absorbed_mla.kernels import operators
from checks.fuzz.compare import Comparison
from checks.fuzz.draw import BF16, FP16, FP32, Draw
from checks.fuzz.families.paged import (
    draw_heads,
    draw_latents,
    draw_queries,
    draw_requests,
    expected,
)
from checks.fuzz.family import Config, family
from checks.fuzz.references import attention, attention_gradients

_PAIRS = 2**22
# From so many queries on a tile has several tokens, if they have few heads.
_MANY = 1024


_DSA, _HOPPER, _TRITON = "kernels.dsa", "kernels.hopper", "kernels.triton"
SUMS = tuple(f"{_DSA}.scatter_add._{name}_kernel" for name in ("table", "place", "sum"))
COUNT, _MERGE = f"{_DSA}.key_lists._count_kernel", f"{_DSA}.splits._merge_kernel"
_LISTS = (COUNT, f"{_DSA}.key_lists._unite_kernel", _MERGE)
_BACKWARD = (f"{_TRITON}.backward_kernels.delta_kernel", *_LISTS, *SUMS)
_CACHED = (f"{_DSA}.topk_slots._slots_kernel", _MERGE)
_FORWARD = f"{_DSA}.forward._forward_kernel"
_ON_HOPPER = f"{_HOPPER}.sparse_forward_kernel.attend_sparse_forward"


def _configure(config: Config, *, hopper: bool = False) -> None:
    """Lists of ``topk`` keys; ``many`` queries, with few heads, so that a tile may have several."""
    gpu = config.device.type == "cuda"
    if hopper:
        config.content, config.rope = config.choice(128, 256, 512, 512), 64
        dtypes = (BF16, FP16)
        config.block_size, config.fp8 = config.choice(16, 64, 64, config.integer(1, 100)), False
    else:
        config.content = config.choice(16, 32, 64, 128, 256, 512, 512) if gpu else 16
        config.rope = config.choice(0, 16, 32, 64, 64) if gpu else config.choice(0, 16)
        dtypes = (BF16, BF16, FP16, FP32) if config.content <= 128 else (BF16, FP16)
        config.block_size = config.choice(1, 7, 64, 64, config.integer(1, 100))
        config.fp8 = config.flag()
    config.dtype = config.choice(*dtypes)
    config.fp8 = config.fp8 and config.dtype != FP32
    config.many, config.deterministic = config.flag(0.3), config.flag()
    config.heads = config.choice(1, 2, 4, 7, 8, 16, 32) if config.many else draw_heads(config)
    topk = config.choice(1, 33, 64, 256, 512, 2048, config.length(2048, 64, 32, least=1))
    config.topk = min(topk, config.limit(2048, 40))


class Operands(NamedTuple):
    """Queries [S_q, B, N, C + R], keys [S_k, B, C + R], lists of keys, and who sees whom."""

    q: Tensor
    kv: Tensor
    chosen: Tensor
    seen: Tensor
    scale: float


def draw_chosen(draw: Draw, queries: int, batch: int, keys: int, topk: int) -> Tensor:
    """Lists int32 [S_q, B, topk] of any of the keys in any order; -1 for none, anywhere."""
    order = draw.uniform(queries, batch, keys).argsort(-1)
    number = draw.integers(min(topk, keys) + 1, queries, batch, 1)
    if draw.flag():
        number = torch.full_like(number, min(topk, keys))
    place = torch.arange(max(keys, topk), device=draw.device)
    order = F.pad(order, (0, max(topk - keys, 0)), value=-1).where(place < number, -1)[..., :topk]
    if draw.flag():
        order = order.gather(-1, draw.uniform(*order.shape).argsort(-1))
    return order.int()


def seen_by(chosen: Tensor, keys: int) -> Tensor:
    """Bool [B, S_q, S_k] of lists [S_q, B, topk]."""
    table = torch.zeros(*chosen.shape[:2], keys + 1, dtype=torch.bool, device=chosen.device)
    table.scatter_(-1, chosen.long().where(chosen >= 0, keys), True)
    return table[..., :keys].transpose(0, 1)


def _draw_operands(config: Config, draw: Draw) -> Operands:
    """Queries, keys and lists of up to ``_PAIRS`` pairs of a query and a key."""
    batch, width = draw.choice(1, 1, 2), config.content + config.rope
    pairs = _PAIRS // (config.heads * batch)
    if config.many:
        queries = draw.integer(draw.limit(_MANY, 5), draw.limit(_MANY + 80, 12))
        keys = draw.length(max(1, min(pairs // queries, draw.limit(1000, 40))), 64, least=1)
    else:
        keys = draw.length(draw.limit(3000, 50), 64, config.topk, least=1)
        queries = draw.length(max(1, min(pairs // keys, draw.limit(300, 9))), 16)
    magnitude = draw.often(1.0, 2.0, 4.0)
    q = draw.normal(queries, batch, config.heads, width, dtype=config.dtype, magnitude=magnitude)
    kv = draw.normal(keys, batch, width, dtype=config.dtype)
    chosen = draw_chosen(draw, queries, batch, keys, config.topk)
    scale = draw.often(1.0, 0.3) * width**-0.5
    return Operands(q, kv, chosen, seen_by(chosen, keys), scale)


def _split(config: Config, draw: Draw, *tensors: Tensor) -> list[Tensor]:
    """Content and rope part of each, with other strides or not."""
    return [
        draw.amid_nan(part) for x in tensors for part in x.split((config.content, config.rope), -1)
    ]


def _run(kernel: str, config: Config, draw: Draw, compare: Comparison) -> None:
    """Forward and backward."""
    q, kv, chosen, seen, scale = _draw_operands(config, draw)
    content = config.content
    hidden = kv.clone()
    hidden[~seen.any(1).transpose(0, 1)] = torch.nan
    operands = _split(config, draw, q, hidden)
    out, lse = operators.sparse_attention_forward(*operands, chosen, scale, kernel)
    exact = q.double(), kv.double()[:, :, None], kv.double()[:, :, None, :content]
    attended = attention(*exact, scale, seen[:, None], config.dtype)
    compare.rows("out", out, *attended.out, config.dtype)
    compare.lse(lse, attended.lse, config.dtype)
    if kernel == "invariant":
        _check_alone(operands, chosen, scale, (out, lse), draw, compare)
        return
    grad = draw.normal(*out.shape, dtype=config.dtype)
    grad_lse = draw.normal(*lse.shape) if draw.flag() else None
    found = operators.sparse_attention_backward(
        grad, grad_lse, out, lse, *operands, chosen, scale, config.deterministic, kernel
    )
    wanted = attention_gradients(*exact, attended, (grad, grad_lse), scale, config.dtype)
    compare.rows("dq_content", found[0], *(x[..., :content] for x in wanted.q), config.dtype)
    compare.rows("dq_rope", found[1], *(x[..., content:] for x in wanted.q), config.dtype)
    compare.rows("dkv", found[2], *(x[:, :, 0] for x in wanted.latent()), config.dtype)


def _check_alone(operands, chosen, scale, found, draw: Draw, compare: Comparison) -> None:
    """A query alone gets the same bits."""
    if not len(chosen):
        return
    which = draw.integer(0, len(chosen) - 1)
    own = slice(which, which + 1)
    alone = operands[0][own], operands[1][own], *operands[2:], chosen[own]
    again = operators.sparse_attention_forward(*alone, scale, "invariant")
    compare.same("out of a query alone", again[0], found[0][own])
    compare.same("lse of a query alone", again[1], found[1][own])


def _cached(kernels: tuple[str, ...], config: Config, draw: Draw, compare: Comparison) -> None:
    """Over the blocks of requests, whose lists have positions."""
    requests = draw_requests(draw, config.heads, draw.limit(3000, 40))
    cached = draw_latents(config, draw, requests.keys)
    q, scale = draw_queries(config, draw, requests)
    chosen = draw.integers(5, requests.tokens, config.topk, dtype=torch.int32)

    def seen(number: int, own: slice, keys: Tensor) -> Tensor:
        lists = draw_chosen(draw, own.stop - own.start, 1, len(keys), config.topk)
        chosen[own] = lists[:, 0]
        return seen_by(lists, len(keys))[:, None]

    out, noise, lse = expected(config, q, cached, requests, scale, seen)
    lists = [draw.integer_tensor(x) for x in (requests.starts, requests.queries)]
    rows = CachedRows(cached.cache)
    places = *lists, cached.table, rows.block_size, rows.of_block, rows.of_position
    scales = None
    if config.fp8:
        latent, scales, k_rope = Fp8Latents(config.content, config.rope).parts(rows.rows)
    else:
        latent, k_rope = rows.rows.split((config.content, config.rope), -1)
    operands = *_split(config, draw, q), latent, scales, k_rope, chosen
    found = operators.sparse_attention_cached(*operands, *places, scale, draw.choice(*kernels))
    compare.rows("out", found[0], out, noise, config.dtype)
    compare.lse(found[1], lse, config.dtype)


def _declare(name: str, *kernels: str, run: Callable, hopper: bool = False, share: float = 1.0):
    """A family with the widths of Triton's kernels, or of those for Hopper."""

    @family(name, *kernels, hopper=hopper, share=share)
    def declared(config: Config, draw: Draw, compare: Comparison) -> None:
        _configure(config, hopper=hopper)
        run(config, draw, compare)


_declare(
    "sparse-triton",
    *(_FORWARD, f"{_DSA}.backward_kernel.backward_kernel", *_BACKWARD),
    run=partial(_run, "triton"),
    share=1.5,
)
_declare("sparse-invariant", _FORWARD, COUNT, run=partial(_run, "invariant"), share=0.5)
_declare(
    "sparse-hopper",
    *(_ON_HOPPER, f"{_HOPPER}.sparse_backward_kernel.attend_sparse_backward", *_BACKWARD),
    run=partial(_run, "hopper"),
    hopper=True,
    share=1.5,
)
_BY_TRITON = ("triton", "triton", "invariant")
_declare("sparse-cached-triton", _FORWARD, *_CACHED, run=partial(_cached, _BY_TRITON))
_declare(
    "sparse-cached-hopper", _ON_HOPPER, *_CACHED, run=partial(_cached, ("hopper",)), hopper=True
)


@family(
    "sparse-target",
    *(f"{_DSA}.kl_target._{name}_kernel" for name in ("visible", "chosen")),
    share=0.7,
)
def targets(config: Config, draw: Draw, compare: Comparison) -> None:
    """Probabilities of chosen keys, and of a run of keys, summed over heads."""
    from absorbed_mla.kernels.dsa.kl_target import chosen_target, visible_target

    _configure(config)
    q, kv, chosen, _, scale = _draw_operands(config, draw)
    probs, lse = _probabilities(q, kv, scale, draw)
    operands = _split(config, draw, q, kv)
    _compare_chosen(chosen_target(tuple(operands), lse, chosen, scale), probs, chosen, compare)
    first, end = sorted(draw.integer(0, len(q)) for _ in range(2))
    key_start = draw.integer(0, len(kv))
    num_keys = draw.integer(0, len(kv) - key_start)
    offset = draw.choice(None, 0, draw.integer(-len(q), len(kv)))
    own = slice(first, end)
    found = visible_target(tuple(operands), lse, own, key_start, num_keys, offset, scale)
    wanted = probs[:, own, key_start : key_start + num_keys]
    if offset is not None:
        wanted = wanted.tril(offset)
    compare.near("visible", found, wanted, 1e-3 * wanted + 1e-6)


def _probabilities(q: Tensor, kv: Tensor, scale: float, draw: Draw) -> tuple[Tensor, Tensor]:
    """fp64 [B, S_q, S_k], summed over heads, and the LSE fp32 [S_q, B, N], some -inf."""
    operands = q.double(), kv.double()[:, :, None], kv.double()[:, :, None]
    every = torch.ones(len(q), len(kv), dtype=torch.bool, device=q.device)
    attended = attention(*operands, scale, every, q.dtype)
    lse = attended.lse.float()
    lse[draw.uniform(*lse.shape) < 0.1] = -torch.inf
    known = (lse != -torch.inf).permute(1, 2, 0)[..., None]
    return (attended.probs * known).sum(1), lse


def _compare_chosen(found: Tensor, probs: Tensor, chosen: Tensor, compare: Comparison) -> None:
    there = (chosen >= 0).transpose(0, 1)
    wanted = probs.gather(-1, chosen.transpose(0, 1).clamp(min=0).long()).where(there, 0.0)
    compare.near("chosen", found, wanted, 1e-3 * wanted + 1e-6)


@family(
    "sparse-target-hopper",
    f"{_HOPPER}.sparse_target_kernel.sum_sparse_probabilities",
    COUNT,
    hopper=True,
    share=0.7,
)
def targets_on_hopper(config: Config, draw: Draw, compare: Comparison) -> None:
    """Probabilities of chosen keys, summed over heads."""
    from absorbed_mla.kernels.hopper.sparse_target import sparse_target

    _configure(config, hopper=True)
    q, kv, chosen, _, scale = _draw_operands(config, draw)
    probs, lse = _probabilities(q, kv, scale, draw)
    operands = tuple(_split(config, draw, q, kv))
    _compare_chosen(sparse_target(operands, lse, chosen, scale), probs, chosen, compare)
