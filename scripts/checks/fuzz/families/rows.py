"""Fuzz families of row-wise kernels: RMSNorm (backward, fused add), RoPE, merging by LSE."""

from __future__ import annotations

import torch
from torch import Tensor

from checks.fuzz.compare import Comparison
from checks.fuzz.draw import BF16, FP16, FP32, Draw
from checks.fuzz.family import Config, family
from checks.fuzz.references import Exact

_NORM = "kernels.invariant.rms_norm"
# Noise of numbers that a kernel may take for 0: fp32's below 2^-126.
_FLUSHED = 1e-33


def _configure_norm(config: Config) -> None:
    most = config.limit(8192, 100)
    width = config.choice(1, 128, 512, 1536, 7168, config.length(8192, 64, 1024, least=1))
    config.width, config.dtype = min(most, width), config.choice(BF16, BF16, FP16, FP32)
    config.weight, config.zero_centered = config.often(config.dtype, FP32), config.flag(0.3)


def expected_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Exact:
    """RMSNorm of rows."""
    x = x.double()
    value = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    value = value * (weight.double() + zero_centered)
    return Exact(value, value.abs())


def expected_rotation(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Exact:
    """Interleaved pairs to rotated halves, or the inverse.

    ``x`` is [..., R], the tables can be expanded to [..., R / 2]; ``back``: halves come in.
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


@family("rms-norm", f"{_NORM}._forward_kernel", f"{_NORM}._backward_kernel")
def norm(config: Config, draw: Draw, compare: Comparison) -> None:
    """Forward and backward."""
    from absorbed_mla.kernels.invariant.rms_norm import rms_norm_backward, rms_norm_forward

    _configure_norm(config)
    rows, zero_centered = draw.length(draw.limit(600, 9), 264, 16), config.zero_centered
    x = draw.normal(rows, config.width, dtype=config.dtype, magnitude=draw.often(1.0, 1e-3, 30.0))
    weight, eps = draw.normal(config.width, dtype=config.weight), draw.choice(1e-6, 1e-5)
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


@family("added-norm", "kernels.added_norm._added_norm_kernel", share=0.5)
def norm_of_a_sum(config: Config, draw: Draw, compare: Comparison) -> None:
    """Behind a residual connection."""
    from absorbed_mla.kernels.added_norm import added_norm

    _configure_norm(config)
    shape = draw.length(draw.limit(300, 9), 16), draw.integer(1, 3), config.width
    x, residual = (draw.normal(*shape, dtype=config.dtype) for _ in range(2))
    weight = draw.normal(config.width, dtype=config.dtype)
    total, normed = added_norm(x, residual, weight, 1e-6, config.zero_centered)
    compare.same("sum", total, (x.float() + residual.float()).to(config.dtype))
    exact = expected_norm(total, weight, 1e-6, config.zero_centered)
    compare.rows("normed", normed, *exact, config.dtype)


@family("rope", "kernels.rotation._rotate_kernel", share=0.5)
def rotation(config: Config, draw: Draw, compare: Comparison) -> None:
    """Of the last channels, in place."""
    from absorbed_mla.kernels.rotation import rotate

    half, before = 2 ** config.integer(0, 6), config.choice(0, 128, 512, config.integer(0, 130))
    config.half, config.before = half, before
    config.heads = config.choice(1, config.integer(1, config.limit(130, 9)))
    config.dtype, config.back = config.choice(BF16, FP16, FP32), config.flag()
    shape = draw.length(draw.limit(200, 5), 16), draw.integer(1, 3), config.heads
    x = draw.normal(*shape, before + 2 * half, dtype=config.dtype)
    angles = draw.uniform(shape[0], half) * 6.3
    cos, sin = angles.cos().float(), angles.sin().float()
    table = cos[:, None, None], sin[:, None, None]
    exact = expected_rotation(x[..., before:], *table, back=config.back)
    found = draw.amid_nan(x.clone())
    rotate(found, cos, sin, config.back)
    compare.same("channels before", found[..., :before], x[..., :before])
    compare.rows("rotated", found[..., before:], *exact, config.dtype)


@family("merge", "kernels.merging._merge_kernel", share=0.3)
def merged_attention(config: Config, draw: Draw, compare: Comparison) -> None:
    """Attention over two sets of keys; the second one's output and the result in other dtypes."""
    from absorbed_mla.kernels.merging import merge, merge_into

    widths = 1, 16, 64, 100, 128, 512, config.integer(1, config.limit(1000, 70))
    config.width, config.part = config.choice(*widths), config.choice(FP32, BF16, FP16)
    config.merged = config.choice(FP32, BF16)
    shape = draw.length(draw.limit(300, 9), 16), draw.integer(1, 3), draw.integer(1, 40)
    out = draw.amid_nan(draw.normal(*shape, config.width))
    part = draw.amid_nan(draw.normal(*shape, config.width, dtype=config.part))
    lse = [draw.normal(*shape, magnitude=draw.often(1.0, 30.0)) for _ in range(2)]
    for each in lse:
        each[draw.uniform(*shape) < 0.2] = -torch.inf
    config.sink = config.flag(0.3)
    if config.sink:
        from absorbed_mla.core_attention.sink import add_sink

        # A set of keys without values, written where the other one is.
        dtype, part, sink = config.part, torch.zeros_like(part), draw.normal(shape[-1])
        lse[1] = sink.expand(shape)
        out = out.to(dtype)
        merged, total = add_sink(out.clone(), lse[0].clone(), sink)
    elif draw.flag():
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
    noise = noise * (1 + both.abs().nan_to_num(0.0, 0.0, 0.0).amax(0)[..., None] / 30) + _FLUSHED
    compare.rows("merged", merged, value, noise, dtype)
    compare.lse(total, expected, FP32)


@family(
    "output-gate",
    "kernels.output_gate._forward_kernel",
    "kernels.output_gate._backward_kernel",
    share=0.3,
)
def output_gate(config: Config, draw: Draw, compare: Comparison) -> None:
    """The product with a sigmoid of each head or channel, and its gradients."""
    from absorbed_mla.kernels.output_gate import gate_backward, gate_forward

    config.dtype, config.logits = config.choice(BF16, FP16, FP32), config.choice(BF16, FP32)
    config.width = config.choice(1, 64, 100, 128, 256, config.integer(1, config.limit(600, 70)))
    shape = draw.length(draw.limit(300, 9), 16), draw.integer(1, 3), draw.integer(1, 40)
    x, grad = (
        draw.amid_nan(draw.normal(*shape, config.width, dtype=config.dtype)) for _ in range(2)
    )
    logits = draw.normal(*shape, dtype=config.logits, magnitude=draw.often(1.0, 30.0))
    share, exact, dy = logits.double().sigmoid()[..., None], x.double(), grad.double()
    rows = x.flatten(-2), grad.flatten(-2)
    found = {"out": (gate_forward(rows[0], logits), exact * share)}
    dx, d_logits = gate_backward(rows[1], rows[0], logits)
    found["dx"] = dx, dy * share
    for name, (one, value) in found.items():
        compare.rows(name, one.view_as(x), value, value.abs() + _FLUSHED, config.dtype)
    products, slope = exact * dy, (share * (-logits.double()).sigmoid()[..., None]).squeeze(-1)
    noise = products.square().sum(-1).sqrt() * slope + _FLUSHED
    compare.rows("d_logits", d_logits, products.sum(-1) * slope, noise, config.logits)
