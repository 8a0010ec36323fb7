"""Attention over the latent on Hopper GPUs: tensor maps and the launch of the forward kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from absorbed_mla.kernels.hopper.forward_kernel import attend_forward
from absorbed_mla.kernels.hopper.forward_tile import KEYS, ROWS

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def forward(
    q_content: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    tiles: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention with scores ``scale * (q_content . latent + q_rope . k_rope)`` and values latent.

    Args:
        q_content: [S_q, B, N, C] in bf16 or fp16; C = 128, 256 or 512.
        q_rope: [S_q, B, N, R]; R = 16, 32 or 64.
        latent: [S_k, B, C].
        k_rope: [S_k, B, R].
        tiles: Of ``query_tiles`` with ``query_tokens`` tokens and the length of the query axis,
            int32 [tiles, 5] on the device: they must cover every query.
        scale: Multiplies the scores.

    Returns:
        Output [S_q, B, N, C] in the dtype of the query and LSE [S_q, B, N] in fp32; 0 and -inf for
        a query that sees no key.

    Raises:
        ValueError: The scale is not positive.
    """
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    queries, batch, heads, content = q_content.shape
    rope = q_rope.shape[3]
    out = torch.empty_like(q_content, memory_format=torch.contiguous_format)
    lse = torch.empty(queries, batch, heads, dtype=torch.float32, device=q_content.device)
    if not len(latent):
        return out.zero_(), lse.fill_(-math.inf)
    tokens = query_tokens(heads)
    packed = ROWS.value // tokens
    programs = len(tiles) * batch * (heads // packed)
    if not programs:
        return out, lse
    attend_forward[(programs,)](
        _tensor_map(q_content, (tokens, 1, packed, content)),
        _tensor_map(q_rope, (tokens, 1, packed, rope)),
        _tensor_map(latent, (KEYS.value, 1, _chunk(content))),
        _tensor_map(k_rope, (KEYS.value, 1, rope)),
        tiles,
        out,
        lse,
        batch,
        heads,
        scale / math.log(2),
        HEADS=packed,
        LATENT=content,
        ROPE=rope,
        num_warps=4,
    )
    return out, lse


def query_tokens(heads: int) -> int:
    """Most queries in a tile, whose rows are tokens x heads, the latter a power of two."""
    return ROWS.value // min(heads & -heads, ROWS.value)


def _chunk(content: int) -> int:
    """How many columns of the latent arrive together: half of a half, but whole swizzles."""
    return max(content // 4, 64)


def _tensor_map(x: Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """What the copy engine needs to load blocks of a tensor; beyond its end it loads zeros."""
    if not _has_tensor_map(x):
        x = x.contiguous()
    # The stride of an axis of one element is never used, but must be valid all the same.
    strides = [s if n > 1 else x.shape[-1] for n, s in zip(x.shape[:-1], x.stride(), strict=False)]
    layout = gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), [*strides, 1], list(block), layout)


def _has_tensor_map(x: Tensor) -> bool:
    """Whether rows lie 16 bytes apart, or a multiple, and begin at such an address."""
    strides = [s for n, s in zip(x.shape[:-1], x.stride(), strict=False) if n > 1]
    aligned = all(s > 0 and s * x.element_size() % 16 == 0 for s in strides)
    return x.stride(-1) == 1 and aligned and x.data_ptr() % 16 == 0
