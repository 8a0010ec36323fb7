"""Backward of attention over the latent on Hopper GPUs: tensor maps, launches, order of dKV."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from absorbed_mla.kernels.hopper.backward_delta import delta
from absorbed_mla.kernels.hopper.backward_kernel import attend_backward
from absorbed_mla.kernels.hopper.backward_tile import KEYS, ROWS

_ROWS, _KEYS = ROWS.value, KEYS.value
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q_content: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    tiles: Tensor,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what ``forward`` took.

    Args:
        grad_out: [S_q, B, N, C].
        grad_lse: [S_q, B, N], or None where the LSE was not used.
        out: [S_q, B, N, C], possibly over more keys than these.
        lse: fp32 [S_q, B, N], over the same keys as ``out``.
        q_content: bf16 or fp16 [S_q, B, N, C].
        q_rope: [S_q, B, N, R].
        latent: [S_k, B, C].
        k_rope: [S_k, B, R].
        tiles: Of ``query_tiles`` with 64 rows (tokens times the largest power of two that divides
            N) and the length of the query axis, int32 [tiles, 5] on the device.
        scale: Multiplies the scores.
        deterministic: Must be False: programs add to the gradients of keys in any order.

    Returns:
        Gradients of q_content and q_rope in their dtype, and of [latent | k_rope] in fp32,
        [S_k, B, C + R]; the latent's is that of the key and of the value.

    Raises:
        ValueError: If ``deterministic`` is True.
    """
    if deterministic:
        raise ValueError(
            "the Hopper backward is not deterministic; the portable one (kernel 'triton') is"
        )
    keys, batch, width = latent.shape
    heads, rope = q_rope.shape[2:]
    packed = min(heads & -heads, _ROWS)
    dq_content, dq_rope = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_content, q_rope)
    )
    blocks = triton.cdiv(keys, _KEYS)
    dkv = latent.new_zeros((batch, blocks, _KEYS * (width + rope)), dtype=torch.float32)
    items = len(tiles) * batch * (heads // packed)
    if not items or not keys:
        return dq_content.zero_(), dq_rope.zero_(), _in_order(dkv, width + rope, keys)
    grad_out = grad_out.to(q_content.dtype)
    tokens = _ROWS // packed
    attend_backward[(items,)](
        _tensor_map(q_content, (tokens, 1, packed, width)),
        _tensor_map(q_rope, (tokens, 1, packed, rope)),
        _tensor_map(grad_out, (tokens, 1, packed, width)),
        _tensor_map(latent, (_KEYS, 1, width)),
        _tensor_map(k_rope, (_KEYS, 1, rope)),
        lse.contiguous(),
        delta(grad_out, grad_lse, out),
        tiles,
        dq_content,
        dq_rope,
        dkv,
        batch,
        heads,
        blocks,
        scale,
        LATENT=width,
        ROPE=rope,
        HEADS=packed,
        num_warps=8,
    )
    return dq_content, dq_rope, _in_order(dkv, width + rope, keys)


def _in_order(dkv: Tensor, columns: int, keys: int) -> Tensor:
    """What ``_reduce`` of the kernel left in the order of fragments, [S_k, B, columns].

    A block of keys is groups of 8 columns, in each 4 warps, 8 rows, 4 pairs of columns, the two
    halves (8 rows each) of a warp's 16 rows, and the columns of the pair.
    """
    batch, blocks = dkv.shape[:2]
    fragments = dkv.view(batch, blocks, columns // 8, 4, 8, 4, 2, 2)
    # -> block, warp, half, row; batch; group, pair, column
    ordered = fragments.permute(1, 3, 6, 4, 0, 2, 5, 7)
    return ordered.reshape(blocks * _KEYS, batch, columns)[:keys]


def _tensor_map(x: Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    """What the hardware copies blocks of ``x`` to shared memory with."""
    if not _can_be_copied(x):
        # A contiguous one may still be at an odd address.
        x = x.clone(memory_format=torch.contiguous_format)
    # The stride of an axis of one element is never used, but must be valid all the same.
    strides = [s if n > 1 else x.shape[-1] for n, s in zip(x.shape[:-1], x.stride())] + [1]
    layout = gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), strides, list(block), layout)


def _can_be_copied(x: Tensor) -> bool:
    """Whether addresses and strides are multiples of 16 bytes."""
    aligned = all(s and s % 8 == 0 for n, s in zip(x.shape[:-1], x.stride()) if n > 1)
    return x.stride(-1) == 1 and aligned and x.data_ptr() % 16 == 0
