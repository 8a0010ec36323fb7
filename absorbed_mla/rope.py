"""Rotary position embedding of the rope parts of query and key: RoPE, YaRN and LongRoPE.

DeepSeek's weights order the rotary channels as interleaved pairs (0,1), (2,3), ... As in Megatron,
the rotation reads such pairs and writes all even channels before all odd ones. Query and key are
reordered alike, so their products, the scores, are those of the paper.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from absorbed_mla.caching import DerivedTables
from absorbed_mla.dims import yarn_mscale
from absorbed_mla.once_differentiable import once_differentiable

ROPE_TYPES = ("rope", "yarn")


def rotates(config: MLATransformerConfig, layer_number: int) -> bool:
    """Whether a layer rotates its rope channels: not where ``no_rope_freq`` has a 1 for it.

    Such a layer (NoPE) has the channels all the same, as in Kimi Linear's ``mla_use_nope``.

    Args:
        config: Megatron's, whose constructor has made a list of ``no_rope_freq``.
        layer_number: From 1, over all pipeline stages.

    Raises:
        ValueError: If that is no list of zeros and ones, or does not say what MTP layers do.
    """
    pattern = getattr(config, "no_rope_freq", None)
    if not pattern:
        return True
    layers = config.num_layers
    if not (isinstance(pattern, list) and len(pattern) == layers and set(pattern) <= {0, 1}):
        raise ValueError(
            f"no_rope_freq must be None or a list of num_layers={layers} zeros (rotated) and ones "
            f"(not rotated), got {pattern!r}"
        )
    if config.mtp_num_layers and len(set(pattern)) > 1:
        raise ValueError(
            f"no_rope_freq must be alike for all layers with mtp_num_layers="
            f"{config.mtp_num_layers}, which it says nothing of; got {pattern!r}"
        )
    # Layers of multi-token prediction have numbers of their own, from 1.
    return not pattern[layer_number - 1]


class RotaryTable:
    """Table of the cosines and sines of RoPE's angles for positions 0, 1, ...

    Layers with the same parameters share one table. Angles are computed in fp64 and cosine and sine
    are rounded once, to fp32: an angle computed in fp32 is off by 0.004 rad at position 100k.

    Args:
        config: Read for ``rope_type``, ``rotary_base``, the YaRN fields and the rotary width.
        factors: ``AbsorbedMLAOptions.rope_factors``.

    Raises:
        ValueError: If ``rope_type``, ``rotary_percent`` (not 1) or the factors are not supported.
    """

    def __init__(self, config: MLATransformerConfig, factors: tuple | None = None) -> None:
        if config.rope_type not in ROPE_TYPES:
            raise ValueError(
                f"rope_type must be one of {', '.join(ROPE_TYPES)}; got {config.rope_type!r}"
            )
        if config.rotary_percent != 1.0:
            raise ValueError(
                "rotary_percent must be 1.0 (qk_pos_emb_head_dim is the rotary width); "
                f"got {config.rotary_percent}"
            )
        if config.rope_type == "yarn":
            for name in ("rotary_scaling_factor", "original_max_position_embeddings"):
                if not getattr(config, name) > 0:
                    raise ValueError(f"{name} must be positive, got {getattr(config, name)}")
        pairs = config.qk_pos_emb_head_dim // 2
        if factors is not None and (len(factors) != pairs or config.rope_type != "rope"):
            raise ValueError(
                f"rope_factors must be None or qk_pos_emb_head_dim / 2 = {pairs} numbers with "
                f"rope_type 'rope', got {len(factors)} with {config.rope_type!r}"
            )
        names = [f.name for f in dataclasses.fields(RotaryParameters) if f.name != "factors"]
        self.parameters = RotaryParameters(
            **{name: getattr(config, name) for name in names}, factors=factors
        )
        self._tables = _tables_of(self.parameters)

    def cos_sin(self, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions below ``num_positions``.

        Returns:
            Two fp32 tensors [num_positions, R / 2], multiplied by YaRN's attention factor.
        """
        # Rounded up to a power of two, so that few tables are made for many sequence lengths.
        size = 1 << max(num_positions - 1, 0).bit_length()
        cos, sin = self._tables.get(
            (size, device), lambda: _build_table(self.parameters, size, device)
        )
        return cos[:num_positions], sin[:num_positions]

    def rows(
        self, max_position: int, positions: Tensor | slice | None, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines [S, R / 2] of every token's position.

        Args:
            max_position: One more than the largest position.
            positions: Of the tokens, int64 [S] or a slice; None where token i has position i.
            device: Where they are needed.
        """
        cos, sin = self.cos_sin(max_position, device)
        return (cos, sin) if positions is None else (cos[positions], sin[positions])


@dataclass(frozen=True, kw_only=True)
class RotaryParameters:
    """What a rotary table depends on: fields of Megatron's config, and ``rope_factors``."""

    qk_pos_emb_head_dim: int
    rope_type: str
    rotary_base: float
    rotary_scaling_factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    factors: tuple[float, ...] | None


@functools.lru_cache(maxsize=8)
def _tables_of(parameters: RotaryParameters) -> DerivedTables:
    """The tables that all layers with these parameters share."""
    # A table of every size, so that none is dropped: a CUDA graph reads its own in every replay.
    return DerivedTables(maxsize=128)


def _build_table(
    parameters: RotaryParameters, size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    frequencies = inverse_frequencies(parameters.qk_pos_emb_head_dim, parameters.rotary_base)
    if parameters.factors is not None:
        frequencies = frequencies / torch.tensor(parameters.factors, dtype=torch.float64)
    concentration = 1.0
    if parameters.rope_type == "yarn":
        frequencies = yarn_frequencies(parameters, frequencies)
        factor = parameters.rotary_scaling_factor
        concentration = yarn_mscale(factor, parameters.mscale)
        concentration /= yarn_mscale(factor, parameters.mscale_all_dim)
    # Not an inference tensor: a table made during generation is used in training as well.
    with torch.inference_mode(False):
        angles = torch.outer(torch.arange(size, dtype=torch.float64), frequencies.clone())
        cos, sin = angles.cos() * concentration, angles.sin() * concentration
        return cos.float().to(device), sin.float().to(device)


def inverse_frequencies(rope_dim: int, base: float) -> Tensor:
    """RoPE's frequencies (arXiv:2104.09864, section 3.2.2), fp64 [rope_dim / 2]."""
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.float64) / max(rope_dim, 1)
    return torch.tensor(base, dtype=torch.float64) ** -exponents


def yarn_frequencies(parameters: RotaryParameters, frequencies: Tensor) -> Tensor:
    """YaRN's blend of interpolated and original frequencies (arXiv:2309.00071, section 3.2).

    A channel pair with fewer than ``beta_slow`` rotations within the original context has its
    frequency divided by ``rotary_scaling_factor``, one with more than ``beta_fast`` keeps it; in
    between, the two are mixed linearly.
    """

    def channel_of(turns: float) -> float:
        context = parameters.original_max_position_embeddings
        turned = math.log(context / (turns * 2 * math.pi))
        return parameters.qk_pos_emb_head_dim * turned / (2 * math.log(parameters.rotary_base))

    low = max(math.floor(channel_of(parameters.beta_fast)), 0)
    high = min(math.ceil(channel_of(parameters.beta_slow)), parameters.qk_pos_emb_head_dim - 1)
    channels = torch.arange(len(frequencies), dtype=torch.float64)
    # 0.001 avoids the division by zero of an empty ramp, as in the published implementations.
    interpolated = ((channels - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (interpolated / parameters.rotary_scaling_factor + (1 - interpolated))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs of ``x`` by their position's angle.

    Args:
        x: [S, B, N, rope], pairs interleaved; rope may be 0.
        cos: fp32 [S, rope / 2], row i for the position of token i.
        sin: Likewise.

    Returns:
        [S, B, N, rope] in the dtype of ``x``: the even channels of all pairs, then the odd ones.
        Computed in fp32 (fp64 for fp64).
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos[:, None, None].to(compute), sin[:, None, None].to(compute)
    even, odd = x[..., 0::2].to(compute), x[..., 1::2].to(compute)
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1).to(x.dtype)


# torch.compile cannot trace an in-place write that autograd learns of by ctx.mark_dirty.
@torch.compiler.disable
def rotate_tail(x: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> Tensor:
    """Apply RoPE to the last ``rope`` channels of every head, in place.

    :func:`apply_rope` in place: neither forward nor backward copies the query.

    Args:
        x: [S, B, num_heads * width]. It is overwritten, and backward overwrites the gradient of the
            result, so nothing else may use either (see ``linear.own_output``).
        cos: fp32 [S, rope / 2], row i for the position of token i; rope <= width.
        sin: Likewise.
        num_heads: Number of heads in the last dim.

    Returns:
        ``x``; with gradients on, a rotated copy if ``x`` is a view, which autograd does not let an
        autograd function modify.
    """
    if not torch.is_grad_enabled():
        _rotate_heads(_by_head(x, num_heads), cos, sin, back=False)
        return x
    return _RotateTail.apply(x.clone() if x._is_view() else x, cos, sin, num_heads)


class _RotateTail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(cos, sin)
        ctx.num_heads = num_heads
        _rotate_heads(_by_head(x, num_heads), cos, sin, back=False)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        # With create_graph=True the incoming gradient is part of a graph and must not change.
        grad = grad.clone() if grad.requires_grad else grad.contiguous()
        cos, sin = ctx.saved_tensors
        _rotate_heads(_by_head(grad, ctx.num_heads), cos, sin, back=True)
        return grad, None, None, None


def _by_head(x: Tensor, num_heads: int) -> Tensor:
    """[S, B, N * width] as [S, B, N, width]."""
    # Tensor.unflatten, which is written in Python, takes the host three times as long.
    tokens, batch, width = x.shape
    return x.view(tokens, batch, num_heads, width // num_heads)


def _rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> None:
    """Rotate the last channels of ``x`` [S, B, N, width] in place, or undo that (``back``)."""
    rope = 2 * cos.shape[-1]
    # The kernel computes in fp32, for widths that are a power of two.
    if x.is_cuda and x.dtype != torch.float64 and rope and not rope & (rope - 1):
        # Imported here, because the package works without Triton on machines without a GPU.
        from absorbed_mla.kernels.rotation import rotate

        rotate(x, cos, sin, back)
    elif rope:
        tail = x[..., x.shape[-1] - rope :]
        tail.copy_(_unrotate(tail, cos, sin) if back else apply_rope(tail, cos, sin))


def _unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The transpose of :func:`apply_rope`, which is its gradient; its inverse without YaRN."""
    compute = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos[:, None, None].to(compute), sin[:, None, None].to(compute)
    even, odd = x.to(compute).chunk(2, dim=-1)
    pairs = torch.stack((even * cos + odd * sin, odd * cos - even * sin), dim=-1)
    return pairs.flatten(-2).to(x.dtype)
