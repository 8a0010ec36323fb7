"""Attention over chosen keys (DSA): forward, backward, and over a cache."""

from __future__ import annotations

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
from checks.fuzz.families.latent import draw_heads
from checks.fuzz.families.paged import draw_cache, draw_requests
from checks.fuzz.family import Family
from checks.fuzz.references import attention, attention_gradients

_PAIRS = 2**22
# From so many queries on a tile has several tokens, if they have few heads.
_MANY = 1024


class Config(NamedTuple):
    """What kernels are compiled for.

    Attributes:
        content: C.
        rope: R.
        heads: N.
        dtype: Of the operands.
        topk: Length of a query's list of keys.
        deterministic: Whether the backward adds in a fixed order.
        many: Whether there are so many queries that a tile may have several.
        block_size: Tokens of a block of a cache.
        fp8: Whether a cache has FP8 rows.
    """

    content: int
    rope: int
    heads: int
    dtype: torch.dtype
    topk: int
    deterministic: bool
    many: bool = False
    block_size: int = 64
    fp8: bool = False


def _topk(draw: Draw) -> int:
    most = draw.limit(2048, 40)
    return min(most, draw.choice(1, 33, 64, 256, 512, 2048, draw.length(2048, 64, 32, least=1)))


def triton_config(draw: Draw) -> Config:
    """What Triton's kernels take."""
    gpu = draw.device.type == "cuda"
    content = draw.choice(16, 32, 64, 128, 256, 512, 512) if gpu else 16
    rope = draw.choice(0, 16, 32, 64, 64) if gpu else draw.choice(0, 16)
    dtype = draw.choice(BF16, BF16, FP16, FP32) if content <= 128 else draw.choice(BF16, FP16)
    many = draw.flag(0.3)
    heads = draw.choice(1, 2, 4, 7, 8, 16, 32) if many else draw_heads(draw)
    block_size = draw.choice(1, 7, 64, 64, draw.integer(1, 100))
    fp8 = draw.flag() and dtype != FP32
    config = content, rope, heads, dtype, _topk(draw), draw.flag(), many, block_size, fp8
    return Config(*config)


def hopper_config(draw: Draw) -> Config:
    """What the kernels for Hopper take."""
    content, dtype, many = draw.choice(128, 256, 512, 512), draw.choice(BF16, FP16), draw.flag(0.3)
    heads = draw.choice(1, 2, 4, 7, 8, 16, 32) if many else draw_heads(draw)
    block_size = draw.choice(16, 64, 64, draw.integer(1, 100))
    return Config(content, 64, heads, dtype, _topk(draw), draw.flag(), many, block_size)


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


def draw_operands(config: Config, draw: Draw) -> Operands:
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


def split_parts(config: Config, draw: Draw, *tensors: Tensor) -> list[Tensor]:
    """Content and rope part of each, with other strides or not."""
    return [
        draw.amid_nan(part) for x in tensors for part in x.split((config.content, config.rope), -1)
    ]


def _run(kernel: str, config: Config, draw: Draw, compare: Comparison) -> None:
    """Forward and backward."""
    q, kv, chosen, seen, scale = draw_operands(config, draw)
    content = config.content
    hidden = kv.clone()
    hidden[~seen.any(1).transpose(0, 1)] = torch.nan
    operands = split_parts(config, draw, q, hidden)
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
    grads = [x if x is None else x.double() for x in (grad, grad_lse)]
    wanted = attention_gradients(*exact, attended, *grads, scale, config.dtype)
    value, noise = (x[:, :, 0].clone() for x in wanted.k)
    value[..., :content] += wanted.v.value[:, :, 0]
    noise[..., :content] = (noise[..., :content].square() + wanted.v.noise[:, :, 0].square()).sqrt()
    compare.rows("dq_content", found[0], *(x[..., :content] for x in wanted.q), config.dtype)
    compare.rows("dq_rope", found[1], *(x[..., content:] for x in wanted.q), config.dtype)
    compare.rows("dkv", found[2], value, noise, config.dtype)


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
    content, width = config.content, config.content + config.rope
    requests = draw_requests(draw, config.heads, draw.limit(3000, 40))
    cached = draw_cache(config, draw, requests.keys)
    magnitude = draw.often(1.0, 2.0, 4.0)
    q = draw.normal(requests.tokens, config.heads, width, dtype=config.dtype, magnitude=magnitude)
    chosen = draw.integers(5, requests.tokens, config.topk, dtype=torch.int32)
    shape = requests.tokens, config.heads
    out = torch.zeros(*shape, content, dtype=torch.float64, device=q.device)
    noise, lse = torch.zeros_like(out), torch.full_like(out[..., 0], -torch.inf)
    scale = draw.often(1.0, 0.3) * width**-0.5
    for keys, count, start in zip(cached.keys, requests.queries, requests.starts):
        own = slice(start, start + count)
        lists = draw_chosen(draw, count, 1, len(keys), config.topk)
        chosen[own] = lists[:, 0]
        k = keys.double()[:, None, None]
        operands = q[own].double()[:, None], k, k[..., :content]
        found = attention(*operands, scale, seen_by(lists, len(keys))[:, None], config.dtype)
        out[own], noise[own] = (x[:, 0] for x in found.out)
        lse[own] = found.lse[:, 0]
    lists = [draw.integer_tensor(x) for x in (requests.starts, requests.queries)]
    rows = CachedRows(cached.cache)
    places = *lists, cached.table, rows.block_size, rows.of_block, rows.of_position
    scales = None
    if config.fp8:
        latent, scales, k_rope = Fp8Latents(content, config.rope).parts(rows.rows)
    else:
        latent, k_rope = rows.rows.split((content, config.rope), -1)
    operands = *split_parts(config, draw, q), latent, scales, k_rope, chosen
    found = operators.sparse_attention_cached(*operands, *places, scale, draw.choice(*kernels))
    compare.rows("out", found[0], out, noise, config.dtype)
    compare.lse(found[1], lse, config.dtype)


_DSA = "kernels.dsa"
_HOPPER = "kernels.hopper"
_COUNT, _UNITE = f"{_DSA}.key_lists._count_kernel", f"{_DSA}.key_lists._unite_kernel"
_LISTS = (_COUNT, _UNITE, f"{_DSA}.splits._merge_kernel")
_SUMS = tuple(f"{_DSA}.scatter_add._{name}_kernel" for name in ("table", "place", "sum"))
_DELTA = "kernels.triton.backward_kernels.delta_kernel"
_FORWARD = f"{_DSA}.forward._forward_kernel"
_CACHED = (f"{_DSA}.cached_lists._slots_kernel", f"{_DSA}.splits._merge_kernel")
FAMILIES = (
    Family(
        "sparse-triton",
        (_FORWARD, f"{_DSA}.backward_kernel.backward_kernel", _DELTA, *_LISTS, *_SUMS),
        triton_config,
        partial(_run, "triton"),
        share=1.5,
    ),
    Family(
        "sparse-invariant",
        (_FORWARD, _COUNT),
        triton_config,
        partial(_run, "invariant"),
        share=0.5,
    ),
    Family(
        "sparse-hopper",
        (
            f"{_HOPPER}.sparse_forward_kernel.attend_sparse_forward",
            f"{_HOPPER}.sparse_backward_kernel.attend_sparse_backward",
            _DELTA,
            *_LISTS,
            *_SUMS,
        ),
        hopper_config,
        partial(_run, "hopper"),
        hopper=True,
        share=1.5,
    ),
    Family(
        "sparse-cached-triton",
        (_FORWARD, *_CACHED),
        triton_config,
        partial(_cached, ("triton", "triton", "invariant")),
    ),
    Family(
        "sparse-cached-hopper",
        (f"{_HOPPER}.sparse_forward_kernel.attend_sparse_forward", *_CACHED),
        hopper_config,
        partial(_cached, ("hopper",)),
        hopper=True,
    ),
)
