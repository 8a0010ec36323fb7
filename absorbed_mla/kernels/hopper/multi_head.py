"""Launcher of the expanded form's forward on Hopper: multi-head attention, K and V per head."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from absorbed_mla.kernels.hopper.multi_head_kernel import attend_multi_head
from absorbed_mla.kernels.hopper.multi_head_tile import BLOCK, ROWS
from absorbed_mla.kernels.hopper.tensor_map import tensor_map
from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.paged.plan import processors

# Keys and values of so many bytes stay in the L2 cache (50 MB) while a section of heads needs them.
_SECTION_BYTES = 24 * 2**20


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tensor,
    scale: float,
    largest: Tensor | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention with scores ``scale * q . k``.

    Args:
        q: [S_q, B, N, D] in bf16 or fp16; D = 64, 96, 128 or 192.
        k: [S_k, B, N, D].
        v: [S_k, B, N, V]; V = 64 or 128.
        tiles: Of ``query_tiles`` with 128 queries and the length of the query axis, int32
            [tiles, 5] on the device: what is in no tile is not written.
        scale: Multiplies the scores.
        largest: Gets the largest score of every row, -inf where it sees no key: [S_q, B, N] fp32,
            contiguous; or None.
        window: With which ``query_tiles`` made the tiles.
        sink: Logits [N] of any dtype beside the scores, whose values are 0; or None.

    Returns:
        Output [S_q, B, N, V] in the dtype of the query and LSE [S_q, B, N] in fp32; 0 and that of
        the sink (-inf without one) for a query that sees no key.

    Raises:
        ValueError: The scale is not positive.
    """
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    queries, batch, heads, width = q.shape
    values = v.shape[3]
    out = torch.empty(queries, batch, heads, values, dtype=q.dtype, device=q.device)
    lse = torch.empty(queries, batch, heads, dtype=torch.float32, device=q.device)
    if not len(k):
        if largest is not None:
            largest.fill_(-math.inf)
        return out.zero_(), lse.fill_(-math.inf) if sink is None else lse.copy_(sink.expand_as(lse))
    groups = batch * heads
    works = len(tiles) * groups
    if not works:
        return out, lse
    content = content_width(width)
    maps = [
        tensor_map(x, (size, 1, 1, part))
        for x, size in ((q, ROWS.value), (k, BLOCK.value))
        for part in (content, width - content)
    ]
    group_bytes = len(k) * (width + values) * k.element_size()
    section = max(min(_SECTION_BYTES // group_bytes, groups), 1)
    launch(
        attend_multi_head,
        (min(processors(q.device), works),),
        *maps,
        tensor_map(v, (BLOCK.value, 1, 1, values)),
        tiles,
        torch.zeros(1, dtype=torch.int32, device=q.device),
        out,
        lse,
        lse if largest is None else largest,
        sink,
        works,
        section,
        len(tiles) * section,
        groups,
        heads,
        scale / math.log(2),
        window,
        RECORD=largest is not None,
        num_warps=4,
    )
    return out, lse


def content_width(width: int) -> int:
    """Width of the first of the two parts of a row that copies load: the largest power of two.

    A box of shared memory has a power of two of columns; for 128 it is half.
    """
    return 1 << (width - 1).bit_length() - 1
