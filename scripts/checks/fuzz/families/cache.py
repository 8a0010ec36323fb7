"""What writes and reads a latent cache: FP8 rows, gathered keys, new latents, shared k_rope."""

from __future__ import annotations

from functools import partial

import torch

from checks.fuzz.compare import Comparison
from checks.fuzz.draw import BF16, FP16, FP32, Draw
from checks.fuzz.families.rows import expected_norm, expected_rotation
from checks.fuzz.family import Config, Family, below
from checks.fuzz.references import fp8_decoded, fp8_parts


def _fp8_config(draw: Draw) -> Config:
    content = draw.choice(4, 16, 64, 128, 132, 256, 512, 512, 4 * draw.integer(1, 160))
    rope, dtype = draw.choice(0, 1, 16, 24, 64, 64), draw.choice(BF16, FP16, FP32)
    return Config(content=content, rope=rope, dtype=dtype)


def _fp8(config: Config, draw: Draw, compare: Comparison) -> None:
    """Bits of PyTorch's conversions; values half a step from two e4m3 numbers may be either."""
    from absorbed_mla.kernels.fp8_latents import decode, encode

    content, rope, dtype = config.content, config.rope, config.dtype
    tokens = draw.length(draw.limit(600, 40), 16)
    rows = draw.normal(tokens, content + rope, dtype=dtype, magnitude=draw.often(1.0, 1e-3, 100.0))
    rows[draw.uniform(tokens) < 0.1] = 0
    values, scales, k_rope = fp8_parts(rows, content)
    made = (
        torch.empty(tokens, content, dtype=torch.uint8, device=rows.device),
        torch.empty_like(scales),
        torch.empty_like(k_rope),
    )
    encode(draw.amid_nan(rows), *made)
    found = made[0].view(torch.float8_e4m3fn)
    compare.near("scales", made[1], scales.double(), scales.double() * 2e-7)
    compare.same("k_rope", made[2], k_rope)
    spread = scales.double().repeat_interleave(128, -1)[:, :content]
    step = (values.float().double().abs() / 8).clamp(min=2.0**-9) * 0.5 * (1 + 1e-5)
    compare.near("values", found.float(), rows[:, :content].double() / spread, step)
    read = torch.empty(tokens, content + rope, dtype=dtype, device=rows.device)
    decode(*made, read)
    compare.same("read", read, fp8_decoded(found, made[1], k_rope, dtype))


def _gather_config(draw: Draw) -> Config:
    width = draw.choice(1, 16, 80, 576, 576, 656, draw.integer(1, 700))
    dtype = draw.choice(BF16, FP32, torch.uint8)
    block_size = draw.choice(1, 16, 64, 64, draw.integer(1, 130))
    return Config(width=width, dtype=dtype, block_size=block_size)


def _gather(config: Config, draw: Draw, compare: Comparison) -> None:
    from absorbed_mla.kernels.paged.gather import gather

    keys = draw.length(draw.limit(2000, 150), 64, config.block_size)
    blocks = -(-keys // config.block_size) + 1
    shape = 2 * blocks, config.block_size, config.width
    cache = draw.integers(100, *shape).to(config.dtype)
    own = draw.integer_tensor(draw.sample(range(2 * blocks), blocks))
    start = draw.integer(0, keys)
    out = torch.full((keys - start, config.width + 3), 7, dtype=config.dtype, device=own.device)
    gather(cache, own, start, keys, out[:, : config.width])
    wanted = cache[own.long()].flatten(0, 1)[start:keys]
    compare.same("keys", out[:, : config.width], wanted)
    compare.same("behind the keys", out[:, config.width :], torch.full_like(out[:, :3], 7))


def _latent_config(draw: Draw) -> Config:
    """Widths of query latents, latents and k_rope; whether the latents are written to a cache."""
    most = draw.limit(2000, 80)
    query = min(most, draw.choice(1, 1536, 512, draw.integer(1, 2000)))
    content = min(most, draw.choice(512, 128, 64, draw.integer(1, 600)))
    dtype, rope = draw.choice(BF16, BF16, FP16, FP32), draw.choice(2, 8, 32, 64, 64)
    options = {"zero_centered": draw.flag(0.3), "writes": draw.flag()}
    return Config(query=query, content=content, rope=rope, dtype=dtype, **options)


def _new_latents(config: Config, draw: Draw, compare: Comparison) -> None:
    from absorbed_mla.kernels.paged.new_latents import Normed, new_latents

    most, width = draw.limit(300, 9), config.content + config.rope
    rows, count = draw.length(most, 16), draw.length(most, 16)
    normal = partial(draw.normal, dtype=config.dtype)
    query, keys = normal(rows, config.query), normal(count, width)
    weights = normal(config.query), normal(config.content)
    angles = draw.uniform(count, config.rope // 2) * 6.3
    cos, sin = angles.cos().float(), angles.sin().float()
    slots, places = None, 0
    if config.writes:
        places = draw.integer(0, count)
        blocks, size = draw.integer(1, 20), draw.integer(1, 70)
        blocks = max(blocks, -(-places // size))
        cache = torch.full((blocks, size + 1, width + 8), torch.nan, device=query.device)
        cache = cache.to(config.dtype)[:, :size, :width]
        own = draw.integer_tensor(draw.sample(range(blocks * size), places), torch.int64)
        slots = cache, own // size, own % size
    normed = (
        Normed(draw.amid_nan(query), weights[0], 1e-6),
        Normed(draw.amid_nan(keys), weights[1], 1e-5),
    )
    found = new_latents(*normed, cos, sin, config.zero_centered, slots)
    latent, k_rope = keys.split((config.content, config.rope), -1)
    norm = partial(expected_norm, zero_centered=config.zero_centered)
    compare.rows("query", found[0], *norm(query, weights[0], 1e-6), config.dtype)
    of_latent, of_rope = found[1].split((config.content, config.rope), -1)
    compare.rows("latent", of_latent, *norm(latent, weights[1], 1e-5), config.dtype)
    compare.rows("k_rope", of_rope, *expected_rotation(k_rope, cos, sin), config.dtype)
    if slots is not None:
        wanted = torch.full_like(cache, torch.nan)
        wanted[slots[1], slots[2]] = found[1][:places]
        compare.same("cache", cache, wanted)


def _broadcast_config(draw: Draw) -> Config:
    rope = draw.choice(1, 16, 32, 64, 64, draw.integer(1, 130))
    width = rope + draw.choice(0, 128, draw.integer(0, 130))
    dtype = draw.choice(BF16, FP16, FP32)
    return Config(rope=rope, width=width, heads=draw.integer(1, 130), dtype=dtype)


def _broadcast(config: Config, draw: Draw, compare: Comparison) -> None:
    from absorbed_mla.kernels.broadcast_k_rope import broadcast_k_rope

    k_rope = draw.normal(draw.length(draw.limit(300, 9), 16), config.rope, dtype=config.dtype)
    keys = draw.normal(len(k_rope), config.heads, config.width, dtype=config.dtype)
    wanted = keys.clone()
    wanted[..., config.width - config.rope :] = k_rope[:, None]
    broadcast_k_rope(draw.amid_nan(k_rope), keys)
    compare.same("keys", keys, wanted)


FAMILIES = (
    Family(
        "fp8-latents",
        below("kernels.fp8_latents", "_encode_kernel", "_decode_kernel"),
        _fp8_config,
        _fp8,
    ),
    Family("gather", ("kernels.paged.gather._gather_kernel",), _gather_config, _gather, share=0.3),
    Family(
        "new-latents",
        ("kernels.paged.new_latents._latents_kernel",),
        _latent_config,
        _new_latents,
        share=0.7,
    ),
    Family(
        "broadcast-k-rope",
        ("kernels.broadcast_k_rope._broadcast_kernel",),
        _broadcast_config,
        _broadcast,
        share=0.3,
    ),
)
