"""Merging attention outputs over disjoint sets of keys by their LSE."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both; the softmax of all is the LSE-weighted mean of the parts.

    Args:
        out: [S, B, N, V] or [T, N, V], normalised over its own keys, fp32 or fp64.
        lse: [S, B, N] or [T, N] in the same dtype; -inf where there was no key (``out`` is 0
            there).
        part: Likewise for the other keys, in any dtype.
        part_lse: Likewise.

    Returns:
        Output and LSE in the dtypes of ``out`` and ``lse``.
    """
    if _by_kernel(out, lse, part_lse):
        # Loaded where it runs: elsewhere the package does without Triton.
        from absorbed_mla.kernels import merging

        return merging.merge(out, lse, part, part_lse)
    total = torch.logaddexp(lse, part_lse)
    # A query without any key has no weights to distribute: -inf - -inf would be NaN.
    reference = total.masked_fill(total == -torch.inf, 0.0)
    weight, part_weight = (torch.exp(x - reference)[..., None] for x in (lse, part_lse))
    return out * weight + part.to(out.dtype) * part_weight, total


def merge_into(
    out: Tensor, lse: Tensor, one: tuple[Tensor, ...], other: tuple[Tensor, ...]
) -> None:
    """Write attention over the keys of both to ``out`` and ``lse``.

    Args:
        out: [S, B, N, V] of any dtype, rounded to once.
        lse: [S, B, N], fp32 (fp64).
        one: Output and LSE over some keys, of the same shapes.
        other: Over the other keys.
    """
    if _by_kernel(lse, one[1], other[1]):
        # Loaded where it runs: elsewhere the package does without Triton.
        from absorbed_mla.kernels import merging

        merging.merge_into(out, lse, *one, *other)
        return
    wide = torch.promote_types(one[0].dtype, lse.dtype)
    merged, total = merge(one[0].to(wide), one[1].to(wide), other[0], other[1].to(wide))
    out.copy_(merged)
    lse.copy_(total)


def _by_kernel(*tensors: Tensor) -> bool:
    return all(x.is_cuda and x.dtype == torch.float32 for x in tensors)
