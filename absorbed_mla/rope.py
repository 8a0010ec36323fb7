"""Rotary position embedding of the rope parts of query and key: RoPE and YaRN.

DeepSeek's weights hold rotary channels as interleaved pairs (0,1),(2,3),... Like Megatron, the
rotation reads pairs and writes halves; query and key agree, so scores are those of the paper.
"""

from __future__ import annotations

import math

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from absorbed_mla.dims import yarn_mscale

ROPE_TYPES = ("rope", "yarn")


class RotaryTable:
    """Cosines and sines for positions 0, 1, ..., grown as longer sequences arrive.

    Angles are computed in fp64 and rounded once, to fp32, so that far positions are as exact as
    near ones (a product of position and frequency in fp32 is off by 0.004 rad at 100k tokens).

    Args:
        config: Read for ``rope_type``, ``rotary_base``, the YaRN fields and the rotary width.

    Raises:
        ValueError: If ``rope_type`` is not one of ``ROPE_TYPES`` or ``rotary_percent`` is not 1.
    """

    def __init__(self, config: MLATransformerConfig) -> None:
        if config.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope_type must be one of {', '.join(ROPE_TYPES)}; got {config.rope_type!r}"
            )
        if config.rotary_percent != 1.0:
            raise ValueError(
                "rotary_percent must be 1.0 (qk_pos_emb_head_dim is the rotary width); "
                f"got {config.rotary_percent}"
            )
        self.config = config
        self._cached: tuple[Tensor, Tensor] | None = None

    def cos_sin(self, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions below ``num_positions``.

        Returns:
            Two fp32 tensors [num_positions, rope / 2], YaRN's concentration factor multiplied in.
        """
        cached = self._cached
        if cached is None or cached[0].device != device or len(cached[0]) < num_positions:
            # Doubling keeps the number of rebuilds logarithmic in the longest sequence.
            size = max(num_positions, 2 * len(cached[0]) if cached is not None else 0)
            cached = self._cached = self._build(size, device)
        return cached[0][:num_positions], cached[1][:num_positions]

    def _build(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        config = self.config
        frequencies = inverse_frequencies(config.qk_pos_emb_head_dim, config.rotary_base)
        concentration = 1.0
        if config.rope_type == "yarn":
            frequencies = yarn_frequencies(config, frequencies)
            concentration = yarn_mscale(config.rotary_scaling_factor, config.mscale) / yarn_mscale(
                config.rotary_scaling_factor, config.mscale_all_dim
            )
        angles = torch.outer(torch.arange(size, dtype=torch.float64), frequencies)
        cos, sin = angles.cos() * concentration, angles.sin() * concentration
        return cos.float().to(device), sin.float().to(device)


def inverse_frequencies(rope_dim: int, base: float) -> Tensor:
    """RoPE's frequencies (arXiv:2104.09864, section 3.2.2), fp64 [rope_dim / 2]."""
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.float64) / max(rope_dim, 1)
    return torch.tensor(base, dtype=torch.float64) ** -exponents


def yarn_frequencies(config: MLATransformerConfig, frequencies: Tensor) -> Tensor:
    """YaRN's blend of interpolated and original frequencies (arXiv:2309.00071, section 3.2).

    Channels that turn fewer than ``beta_slow`` times within the original context are interpolated
    by ``rotary_scaling_factor``, those that turn more than ``beta_fast`` times are kept.
    """

    def channel_of(turns: float) -> float:
        context = config.original_max_position_embeddings
        return (
            config.qk_pos_emb_head_dim
            * math.log(context / (turns * 2 * math.pi))
            / (2 * math.log(config.rotary_base))
        )

    low = max(math.floor(channel_of(config.beta_fast)), 0)
    high = min(math.ceil(channel_of(config.beta_slow)), config.qk_pos_emb_head_dim - 1)
    channels = torch.arange(len(frequencies), dtype=torch.float64)
    # 0.001 avoids the division by zero of an empty ramp, as in the published implementations.
    interpolated = ((channels - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (interpolated / config.rotary_scaling_factor + (1 - interpolated))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs of ``x`` by their position's angle.

    Args:
        x: [S, B, N, rope], pairs interleaved.
        cos: fp32 [S, rope / 2], row i for the position of token i.
        sin: Likewise.

    Returns:
        [S, B, N, rope] in the dtype of ``x``, first the even then the odd channels of the pairs.
        Computed in fp32 (fp64 for fp64).
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos[:, None, None].to(compute), sin[:, None, None].to(compute)
    even, odd = x[..., 0::2].to(compute), x[..., 1::2].to(compute)
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1).to(x.dtype)
