"""Kernel of ``core_attention.merge``: attention over two sets of keys, merged by LSE."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch

# Values that a program of 128 threads computes.
_NUMBERS = 4096


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """See ``core_attention.merge.merge``; ``out`` and ``lse`` are fp32, ``part_lse`` too."""
    if out.ndim == 3:  # tokens on one axis, without a batch
        merged, total = merge(*(x.unsqueeze(1) for x in (out, lse, part, part_lse)))
        return merged.squeeze(1), total.squeeze(1)
    merged, total = out.new_empty(out.shape), lse.new_empty(lse.shape)
    merge_into(merged, total, out, lse, part, part_lse)
    return merged, total


def merge_into(
    merged: Tensor, total: Tensor, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor
) -> None:
    """See ``core_attention.merge.merge_into``; all LSE are fp32, outputs of any dtype.

    Args:
        merged: [S, B, N, V], the last dim contiguous.
        total: [S, B, N].
        out: As ``merged``.
        lse: As ``total``.
        part: As ``merged``.
        part_lse: As ``total``.
    """
    out, part = (x if x.stride(-1) == 1 else x.contiguous() for x in (out, part))
    tokens, batch, heads, width = out.shape
    num_rows = tokens * batch * heads
    if not num_rows:
        return
    columns = 1 << (width - 1).bit_length()
    rows = max(_NUMBERS // columns, 1)
    # Triton launches on the current device, whatever the tensors' is.
    with torch.cuda.device_of(out):
        launch(
            _merge_kernel,
            (-(-num_rows // rows),),
            out,
            part,
            merged,
            lse,
            part_lse,
            total,
            tokens * batch,
            batch,
            heads,
            *out.stride()[:3],
            *part.stride()[:3],
            *merged.stride()[:3],
            *lse.stride(),
            *part_lse.stride(),
            *total.stride(),
            WIDTH=width,
            COLUMNS=columns,
            ROWS=rows,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["num_tokens"])
def _merge_kernel(
    out_ptr,
    part_ptr,
    merged_ptr,
    lse_ptr,
    part_lse_ptr,
    total_ptr,
    num_tokens,
    batch,
    heads,
    out_s,
    out_b,
    out_n,
    part_s,
    part_b,
    part_n,
    merged_s,
    merged_b,
    merged_n,
    lse_s,
    lse_b,
    lse_n,
    part_lse_s,
    part_lse_b,
    part_lse_n,
    total_s,
    total_b,
    total_n,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    # A row is a head of a token. No memory holds 2^31 of them. [ROWS]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Multiplied here, so that it is known to be a multiple of what ``heads`` is one of.
    present = row < num_tokens * heads
    place = row // heads
    s, b = (place // batch).to(tl.int64), (place % batch).to(tl.int64)
    n = (row % heads).to(tl.int64)
    lse = tl.load(lse_ptr + s * lse_s + b * lse_b + n * lse_n, mask=present)
    part_lse = tl.load(
        part_lse_ptr + s * part_lse_s + b * part_lse_b + n * part_lse_n, mask=present
    )
    larger = tl.where(lse > part_lse, lse, part_lse)
    # A query without any key has no weights to distribute: -inf - -inf would be NaN.
    reference = tl.where(larger == -float("inf"), 0.0, larger)
    weight, part_weight = tl.exp(lse - reference), tl.exp(part_lse - reference)
    weights = weight + part_weight
    total = reference + tl.log(weights)
    tl.store(total_ptr + s * total_s + b * total_b + n * total_n, total, mask=present)
    weights = tl.where(weights > 0, weights, 1.0)
    weight, part_weight = (weight / weights)[:, None], (part_weight / weights)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = present[:, None] & (column < WIDTH)
    out_row, part_row = s * out_s + b * out_b + n * out_n, s * part_s + b * part_b + n * part_n
    out = tl.load(out_ptr + out_row[:, None] + column, mask=inside).to(tl.float32)
    part = tl.load(part_ptr + part_row[:, None] + column, mask=inside).to(tl.float32)
    merged = out * weight + part * part_weight
    merged_row = s * merged_s + b * merged_b + n * merged_n
    tl.store(merged_ptr + merged_row[:, None] + column, merged, mask=inside)
