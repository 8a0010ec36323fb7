"""Small layers with DeepSeek Sparse Attention, and random weights for them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tests.oracle_dsa import OracleDSA
from tests.support.cases import TINY

# Fewer keys are chosen than most queries of the tests' layouts see.
TINY_DSA = OracleDSA(mla=TINY, heads=3, width=16, topk=4)
VARIANTS = {
    "deepseek": TINY_DSA,
    "glm": replace(TINY_DSA, interleaved=True, hadamard=False, k_norm_eps=1e-3),
    "no_relu": replace(TINY_DSA, relu=False, hadamard=False),
    "q_lora_none": replace(TINY_DSA, mla=replace(TINY, q_lora_rank=None)),
    "no_rope": replace(TINY_DSA, mla=replace(TINY, rope=0, rope_type="rope", mscale_all_dim=0.0)),
    "topk_above": replace(TINY_DSA, topk=64),
}


def random_weights(dsa: OracleDSA, seed: int = 0) -> dict[str, Tensor]:
    """Float64 weights that keep activations near unit size; norm gains near one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in dsa.weight_shapes().items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if len(shape) == 2:
            weights[name] = noise / shape[1] ** 0.5
        else:
            weights[name] = noise / 5 + (name != "i_k_bias")
    return weights
