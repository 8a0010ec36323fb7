"""Fuzz families of a latent cache: FP8 rows, gathered keys, new latents, shared k_rope."""

from __future__ import annotations

from functools import partial

import torch

from checks.fuzz.compare import Comparison
from checks.fuzz.draw import BF16, FP16, FP32, Draw
from checks.fuzz.families.rows import expected_norm, expected_rotation
from checks.fuzz.family import Config, family
from checks.fuzz.references import fp8_decoded, fp8_parts


@family("fp8-latents", "kernels.fp8_latents._encode_kernel", "kernels.fp8_latents._decode_kernel")
def fp8_latents(config: Config, draw: Draw, compare: Comparison) -> None:
    """Bits of PyTorch's conversions; values half a step from two e4m3 numbers may be either."""
    from absorbed_mla.kernels.fp8_latents import decode, encode

    widths = 4, 16, 64, 128, 132, 256, 512, 512, 4 * config.integer(1, 160)
    content = config.content = config.choice(*widths)
    rope = config.rope = config.choice(0, 1, 16, 24, 64, 64)
    dtype = config.dtype = config.choice(BF16, FP16, FP32)
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


@family("gather", "kernels.paged.gather._gather_kernel", share=0.3)
def gathered_keys(config: Config, draw: Draw, compare: Comparison) -> None:
    """The keys of a request, from its blocks."""
    from absorbed_mla.kernels.paged.gather import gather

    width = config.width = config.choice(1, 16, 80, 576, 576, 656, config.integer(1, 700))
    config.dtype = config.choice(BF16, FP32, torch.uint8)
    size = config.block_size = config.choice(1, 16, 64, 64, config.integer(1, 130))
    keys = draw.length(draw.limit(2000, 150), 64, size)
    blocks = -(-keys // size) + 1
    cache = draw.integers(100, 2 * blocks, size, width).to(config.dtype)
    own = draw.integer_tensor(draw.sample(range(2 * blocks), blocks))
    start = draw.integer(0, keys)
    out = torch.full((keys - start, width + 3), 7, dtype=config.dtype, device=own.device)
    gather(cache, own, start, keys, out[:, :width])
    wanted = cache[own.long()].flatten(0, 1)[start:keys]
    compare.same("keys", out[:, :width], wanted)
    compare.same("behind the keys", out[:, width:], torch.full_like(out[:, :3], 7))


@family("new-latents", "kernels.paged.new_latents._latents_kernel", share=0.7)
def new_latents_of_tokens(config: Config, draw: Draw, compare: Comparison) -> None:
    """Norms of query latents and latents, k_rope rotated, both written to a cache or not."""
    from absorbed_mla.kernels.paged.new_latents import Normed, new_latents

    most = config.limit(2000, 80)
    config.query = min(most, config.choice(1, 1536, 512, config.integer(1, 2000)))
    content = config.content = min(most, config.choice(512, 128, 64, config.integer(1, 600)))
    rope = config.rope = config.choice(2, 8, 32, 64, 64)
    dtype = config.dtype = config.choice(BF16, BF16, FP16, FP32)
    config.zero_centered, config.writes = config.flag(0.3), config.flag()
    most = draw.limit(300, 9)
    rows, count = draw.length(most, 16), draw.length(most, 16)
    normal = partial(draw.normal, dtype=dtype)
    query, keys = normal(rows, config.query), normal(count, content + rope)
    weights = normal(config.query), normal(content)
    angles = draw.uniform(count, rope // 2) * 6.3
    cos, sin = angles.cos().float(), angles.sin().float()
    slots, places = None, 0
    if config.writes:
        places = draw.integer(0, count)
        blocks, size = draw.integer(1, 20), draw.integer(1, 70)
        blocks = max(blocks, -(-places // size))
        cache = torch.full((blocks, size + 1, content + rope + 8), torch.nan, device=query.device)
        cache = cache.to(dtype)[:, :size, : content + rope]
        own = draw.integer_tensor(draw.sample(range(blocks * size), places), torch.int64)
        slots = cache, own // size, own % size
    normed = (
        Normed(draw.amid_nan(query), weights[0], 1e-6),
        Normed(draw.amid_nan(keys), weights[1], 1e-5),
    )
    found = new_latents(*normed, cos, sin, config.zero_centered, slots)
    latent, k_rope = keys.split((content, rope), -1)
    norm = partial(expected_norm, zero_centered=config.zero_centered)
    compare.rows("query", found[0], *norm(query, weights[0], 1e-6), dtype)
    of_latent, of_rope = found[1].split((content, rope), -1)
    compare.rows("latent", of_latent, *norm(latent, weights[1], 1e-5), dtype)
    compare.rows("k_rope", of_rope, *expected_rotation(k_rope, cos, sin), dtype)
    if slots is not None:
        wanted = torch.full_like(cache, torch.nan)
        wanted[slots[1], slots[2]] = found[1][:places]
        compare.same("cache", cache, wanted)


@family("broadcast-k-rope", "kernels.broadcast_k_rope._broadcast_kernel", share=0.3)
def broadcast(config: Config, draw: Draw, compare: Comparison) -> None:
    """Every head's key ends with the same k_rope."""
    from absorbed_mla.kernels.broadcast_k_rope import broadcast_k_rope

    rope = config.rope = config.choice(1, 16, 32, 64, 64, config.integer(1, 130))
    before = config.before = config.choice(0, 128, config.integer(0, 130))
    heads, dtype = config.integer(1, 130), config.choice(BF16, FP16, FP32)
    config.heads, config.dtype = heads, dtype
    k_rope = draw.normal(draw.length(draw.limit(300, 9), 16), rope, dtype=dtype)
    keys = draw.normal(len(k_rope), heads, before + rope, dtype=dtype)
    wanted = keys.clone()
    wanted[..., before:] = k_rope[:, None]
    broadcast_k_rope(draw.amid_nan(k_rope), keys)
    compare.same("keys", keys, wanted)
