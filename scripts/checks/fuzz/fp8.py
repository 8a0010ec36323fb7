"""Rows of a latent cache in FP8 by PyTorch: C e4m3 values, fp32 scales of 128 of them, k_rope."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_GROUP, _ALIGNED = 128, 16
# The largest number of e4m3, and the least magnitude that a group's scale is computed for.
_LARGEST, _LEAST = 448, 2.0**-100


def fp8_parts(rows: Tensor, content: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values e4m3 [..., C], scales fp32 [..., C / 128] and k_rope bf16 of rows [..., C + R]."""
    latent, k_rope = rows[..., :content].float(), rows[..., content:]
    padded = F.pad(latent, (0, -content % _GROUP)).unflatten(-1, (-1, _GROUP))
    scales = padded.abs().amax(-1).clamp(min=_LEAST) * (1 / _LARGEST)
    values = (padded / scales[..., None]).clamp(-_LARGEST, _LARGEST)
    values = values.flatten(-2)[..., :content].to(torch.float8_e4m3fn)
    return values, scales, k_rope.bfloat16()


def fp8_bytes(values: Tensor, scales: Tensor, k_rope: Tensor) -> Tensor:
    """uint8 rows, whose bytes are a multiple of 16."""
    parts = [x for x in (values, scales, k_rope) if x.shape[-1]]
    # Not contiguous(), which leaves the strides of an empty tensor.
    rows = [x.clone(memory_format=torch.contiguous_format).view(torch.uint8) for x in parts]
    rows = torch.cat(rows, -1)
    return F.pad(rows, (0, -rows.shape[-1] % _ALIGNED), value=0xFF)


def decoded(values: Tensor, scales: Tensor, k_rope: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., C + R] in ``dtype``, which the format is read in."""
    spread = scales.repeat_interleave(_GROUP, -1)[..., : values.shape[-1]]
    latent = (values.float() * spread).to(dtype)
    return torch.cat((latent, k_rope.to(dtype)), -1)
