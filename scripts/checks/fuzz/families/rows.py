"""RMSNorm, also backward and behind a residual connection; rotary embeddings; merging by LSE."""

from __future__ import annotations

import torch
from torch import Tensor

from checks.fuzz.compare import Comparison
from checks.fuzz.draw import BF16, FP16, FP32, Draw
from checks.fuzz.family import Config, Family, below
from checks.fuzz.references import Exact


def _norm_config(draw: Draw) -> Config:
    most = draw.limit(8192, 100)
    width = min(most, draw.choice(1, 128, 512, 1536, 7168, draw.length(8192, 64, 1024, least=1)))
    dtype = draw.choice(BF16, BF16, FP16, FP32)
    weight, zero_centered = draw.often(dtype, FP32), draw.flag(0.3)
    return Config(width=width, dtype=dtype, weight=weight, zero_centered=zero_centered)


def expected_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Exact:
    """RMSNorm of rows."""
    x = x.double()
    value = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    value = value * (weight.double() + zero_centered)
    return Exact(value, value.abs())


def expected_rotation(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Exact:
    """Interleaved pairs to rotated halves, or the inverse.

    Args:
        x: [..., R].
        cos: Can be expanded to [..., R / 2].
        sin: Likewise.
        back: Whether halves come in.
    """
    x, cos, sin = x.double(), cos.double(), sin.double()
    if back:
        first, second = x.chunk(2, -1)
        found = torch.stack((first * cos + second * sin, second * cos - first * sin), -1)
        found = found.flatten(-2)
    else:
        even, odd = x[..., ::2], x[..., 1::2]
        found = torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)
    return Exact(found, found.abs() + 1e-4 * x.abs())


def _norm(config: Config, draw: Draw, compare: Comparison) -> None:
    from absorbed_mla.kernels.invariant.rms_norm import rms_norm_backward, rms_norm_forward

    rows = draw.length(draw.limit(600, 9), 264, 16)
    x = draw.normal(rows, config.width, dtype=config.dtype, magnitude=draw.often(1.0, 1e-3, 30.0))
    weight = draw.normal(config.width, dtype=config.weight)
    eps, zero_centered = draw.choice(1e-6, 1e-5), config.zero_centered
    found, scale = rms_norm_forward(draw.amid_nan(x), weight, eps, zero_centered, config.dtype)
    exact = expected_norm(x, weight, eps, zero_centered)
    compare.rows("result", found, *exact, config.dtype)
    inverse = torch.rsqrt(x.double().square().mean(-1) + eps)
    compare.near("scale", scale, inverse, inverse * 1e-5)
    if not rows:
        return
    grad = draw.normal(rows, config.width, dtype=config.dtype)
    grads = rms_norm_backward(grad, x, weight, scale, zero_centered)
    normed = x.double() * inverse[:, None]
    weighted = grad.double() * (weight.double() + zero_centered)
    inner = (weighted * normed).mean(-1, keepdim=True)
    value = (weighted - normed * inner) * inverse[:, None]
    # The difference of two terms, each rounded in fp32.
    lost = 4 * torch.finfo(FP32).eps / torch.finfo(config.dtype).eps * inverse[:, None]
    noise = value.abs() + lost * (weighted.abs() + normed.abs() * inner.abs())
    compare.rows("dx", grads[0], value, noise, config.dtype)
    terms = grad.double() * normed
    # Sums in fp32 are rounded on the way, where they may be larger than at the end.
    noise = terms.sum(0).abs() + 2e-2 * terms.square().sum(0).sqrt()
    compare.rows("dweight", grads[1], terms.sum(0), noise, config.weight)


def _added(config: Config, draw: Draw, compare: Comparison) -> None:
    from absorbed_mla.kernels.added_norm import added_norm

    shape = draw.length(draw.limit(300, 9), 16), draw.integer(1, 3), config.width
    x, residual = (draw.normal(*shape, dtype=config.dtype) for _ in range(2))
    weight = draw.normal(config.width, dtype=config.dtype)
    total, normed = added_norm(x, residual, weight, 1e-6, config.zero_centered)
    compare.same("sum", total, (x.float() + residual.float()).to(config.dtype))
    exact = expected_norm(total, weight, 1e-6, config.zero_centered)
    compare.rows("normed", normed, *exact, config.dtype)


def _rope_config(draw: Draw) -> Config:
    """Half of the rotated width, the channels before it, and whether it is rotated back."""
    before = draw.choice(0, 128, 512, draw.integer(0, 130))
    heads = draw.choice(1, draw.integer(1, draw.limit(130, 9)))
    sizes = {"half": 2 ** draw.integer(0, 6), "before": before, "heads": heads}
    return Config(**sizes, dtype=draw.choice(BF16, FP16, FP32), back=draw.flag())


def _rotate(config: Config, draw: Draw, compare: Comparison) -> None:
    from absorbed_mla.kernels.rotation import rotate

    shape = draw.length(draw.limit(200, 5), 16), draw.integer(1, 3), config.heads
    width = config.before + 2 * config.half
    x = draw.normal(*shape, width, dtype=config.dtype)
    angles = draw.uniform(shape[0], config.half) * 6.3
    cos, sin = angles.cos().float(), angles.sin().float()
    exact = expected_rotation(
        x[..., config.before :], cos[:, None, None], sin[:, None, None], back=config.back
    )
    found = draw.amid_nan(x.clone())
    rotate(found, cos, sin, config.back)
    compare.same("channels before", found[..., : config.before], x[..., : config.before])
    compare.rows("rotated", found[..., config.before :], *exact, config.dtype)


def _merge_config(draw: Draw) -> Config:
    """Width of a row, and dtypes of the second set's output and of the result."""
    width = draw.choice(1, 16, 64, 100, 128, 512, draw.integer(1, draw.limit(1000, 70)))
    return Config(width=width, part=draw.choice(FP32, BF16, FP16), merged=draw.choice(FP32, BF16))


def _merge(config: Config, draw: Draw, compare: Comparison) -> None:
    """Attention over two sets of keys."""
    from absorbed_mla.kernels.merging import merge, merge_into

    shape = draw.length(draw.limit(300, 9), 16), draw.integer(1, 3), draw.integer(1, 40)
    out = draw.amid_nan(draw.normal(*shape, config.width))
    part = draw.amid_nan(draw.normal(*shape, config.width, dtype=config.part))
    lse = [draw.normal(*shape, magnitude=draw.often(1.0, 30.0)) for _ in range(2)]
    for each in lse:
        each[draw.uniform(*shape) < 0.2] = -torch.inf
    if draw.flag():
        dtype, (merged, total) = FP32, merge(out, lse[0], part, lse[1])
    else:
        dtype = config.merged
        merged, total = torch.empty_like(part, dtype=dtype), torch.empty_like(lse[0])
        merge_into(merged, total, out, lse[0], part, lse[1])
    both = torch.stack([x.double() for x in lse])
    expected = both.logsumexp(0)
    weights = torch.exp(both - expected.masked_fill(expected == -torch.inf, 0.0))[..., None]
    terms = weights * torch.stack([out.double(), part.double()])
    value, noise = terms.sum(0), terms.square().sum(0).sqrt()
    # The weights' errors grow with the LSE that they are computed from.
    noise = noise * (1 + both.abs().nan_to_num(0.0, 0.0, 0.0).amax(0)[..., None] / 30)
    compare.rows("merged", merged, value, noise, dtype)
    compare.lse(total, expected, FP32)


FAMILIES = (
    Family(
        "rms-norm",
        below("kernels.invariant.rms_norm", "_forward_kernel", "_backward_kernel"),
        _norm_config,
        _norm,
    ),
    Family(
        "added-norm", ("kernels.added_norm._added_norm_kernel",), _norm_config, _added, share=0.5
    ),
    Family("rope", ("kernels.rotation._rotate_kernel",), _rope_config, _rotate, share=0.5),
    Family("merge", ("kernels.merging._merge_kernel",), _merge_config, _merge, share=0.3),
)
