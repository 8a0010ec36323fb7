"""Attention over two sets of keys, merged by LSE."""

from __future__ import annotations

from typing import NamedTuple

import torch

from checks.fuzz.compare import Comparison
from checks.fuzz.draw import BF16, FP16, FP32, Draw
from checks.fuzz.family import Family


class Config(NamedTuple):
    """What the kernel is compiled for.

    Attributes:
        width: Of a row.
        part: Dtype of the second set's output.
        merged: Dtype of the result.
    """

    width: int
    part: torch.dtype
    merged: torch.dtype


def _config(draw: Draw) -> Config:
    width = draw.choice(1, 16, 64, 100, 128, 512, draw.integer(1, draw.limit(1000, 70)))
    return Config(width, draw.choice(FP32, BF16, FP16), draw.choice(FP32, BF16))


def _run(config: Config, draw: Draw, compare: Comparison) -> None:
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


FAMILIES = (Family("merge", ("kernels.merging._merge_kernel",), _config, _run, share=0.3),)
