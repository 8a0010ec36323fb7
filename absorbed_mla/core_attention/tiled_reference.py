"""Batch-invariant absorbed attention in plain PyTorch.

Every token has products of its own, of one shape, over tiles of keys in their order, counted from
the first key of its sequence; what it does not see adds exact zeros. So a token gets the same bits
whatever else is computed with it, and from the latents of a forward as from a cache of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from absorbed_mla.batch_invariant import parts
from absorbed_mla.core_attention.backends.reference import reference_backward
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput

TILE_KEYS = 64
# Tiles of keys are gathered for so many tokens at a time: 38 MB in fp32 at DeepSeek-V3's widths.
CHUNK_TOKENS = 256
_CACHE_LINE = 64


def attend_to_tiles(
    query: Tensor, tiles: Iterator[tuple[Tensor, Tensor]], scale: float, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention with an online softmax (FlashAttention, arXiv:2205.14135), without autograd.

    Args:
        query: [T, N, D], fp32 or fp64.
        tiles: Keys of every token [T, TILE_KEYS, D], any dtype, 0 where they are not seen, and who
            sees them, bool [T, TILE_KEYS].
        scale: Multiplies the scores.
        width: The first channels of a key are its value.

    Returns:
        Output [T, N, width], natural-log LSE [T, N] and largest score [T, N]; 0, -inf and -inf for
        a token that sees no key.
    """
    shape = query.shape[:2]
    products = row_products
    if parts.fixed.count is not None:
        products = partial(_head_products, heads=parts.split_size(query.shape[1]))
    query = padded_rows(query)
    largest = query.new_full(shape, -torch.inf)
    total, acc = query.new_zeros(shape), padded_rows(query.new_zeros(*shape, width))
    for key, seen in tiles:
        key = padded_rows(key.to(query.dtype))
        scores = products(query, key.transpose(1, 2)) * scale
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        larger = torch.maximum(largest, scores.amax(-1))
        # -inf - -inf would be NaN for a token that has seen nothing.
        shift = larger.masked_fill(larger == -torch.inf, 0.0)
        probs, decay = torch.exp(scores - shift[..., None]), torch.exp(largest - shift)
        total = total * decay + probs.sum(-1)
        value = key[..., : acc.shape[-1]].contiguous()  # the channels behind width are cut off
        acc = acc * decay[..., None] + products(probs, value)
        largest = larger
    blind = total == 0
    out = acc[..., :width] / total.masked_fill(blind, 1.0)[..., None]
    return out, largest + total.log(), largest


def padded_rows(x: Tensor) -> Tensor:
    """``x`` [T, M, K] with zeros behind its rows, so that every row begins on a cache line.

    How a product is summed depends on where in memory its operands begin. Rows of any other width
    would put the matrices of one token elsewhere than those of the next.
    """
    missing = -x.shape[-1] % (_CACHE_LINE // x.element_size())
    return F.pad(x, (0, missing)) if missing else x


def row_products(left: Tensor, right: Tensor) -> Tensor:
    """Products [T, M, N], of one shape for every token, each computed by one thread.

    Threads that share a product divide its rows, and how it is summed depends on their number. So
    there are as many products as threads at least; zeros make up for what is missing.

    Batch-invariant mode leaves the ``out`` variant alone; the other would pad the rows.
    """
    missing = torch.get_num_threads() - len(left)
    if missing <= 0 or not len(left):
        return _products(left, right)
    return _products(_more_matrices(left, missing), _more_matrices(right, missing))[: len(left)]


def _head_products(left: Tensor, right: Tensor, heads: int) -> Tensor:
    """:func:`row_products` of rows that are heads, so many at a time."""
    return torch.cat([row_products(x.contiguous(), right) for x in left.split(heads, 1)], dim=1)


def _products(left: Tensor, right: Tensor) -> Tensor:
    return torch.bmm(left, right, out=left.new_empty(*left.shape[:2], right.shape[-1]))


def _more_matrices(x: Tensor, count: int) -> Tensor:
    """``x`` [T, M, K] and ``count`` zero matrices, which lie in memory as those of ``x`` do."""
    if x.stride(1) == 1 < x.stride(2):
        return _more_matrices(x.mT, count).mT
    return F.pad(x, (0, 0, 0, 0, 0, count))


class TiledReferenceBackend:
    """An attention backend of the absorbed form, batch-invariant: any dtype, without a mask."""

    name = "reference"
    sinks = False
    backward = staticmethod(reference_backward)

    def forward(self, operands: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        """See ``reference_forward``; one key head, which is the value too.

        The output has the dtype of the query, as over a cache: a sink then scales equal bits.
        """
        q_content, q_rope, k_content, k_rope, value = operands
        assert value is None and rules.attention_mask is None and not rules.dropout
        tokens, batch, _, width = q_content.shape
        compute = torch.promote_types(q_content.dtype, torch.float32)
        out = torch.empty_like(q_content, memory_format=torch.contiguous_format)
        lse = q_content.new_empty(q_content.shape[:3], dtype=compute)
        kv = torch.cat((k_content.squeeze(2), k_rope), dim=-1)
        first, last = _key_ranges(rules.spans, tokens)
        for entry in range(batch):
            for start in range(0, tokens, CHUNK_TOKENS):
                part = slice(start, start + CHUNK_TOKENS)
                query = torch.cat((q_content[part, entry], q_rope[part, entry]), dim=-1)
                tiles = _tiles(kv[:, entry], first[part], last[part])
                out[part, entry], lse[part, entry], largest = attend_to_tiles(
                    query.to(compute), tiles, rules.scale, width
                )
                rules.record(largest.unsqueeze(1))
        return AttentionOutput(out, lse)


def _key_ranges(spans: tuple[Span, ...], tokens: int) -> tuple[Tensor, Tensor]:
    """First key of every token's sequence, and the last one it sees counted from there, or -1."""
    first = torch.zeros(tokens, dtype=torch.long)
    last = torch.full((tokens,), -1)
    for span in spans:
        keys = span.key_end - span.key_start
        first[span.queries] = span.key_start
        if span.causal_offset is None:
            last[span.queries] = keys - 1
        else:
            seen = torch.arange(span.query_end - span.query_start) + span.causal_offset
            last[span.queries] = seen.clamp(min=-1, max=keys - 1)
    return first, last


def _tiles(kv: Tensor, first: Tensor, last: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The keys [S_k, D] as every token sees them, tile by tile."""
    for start in range(0, int(last.max()) + 1, TILE_KEYS):
        key = torch.arange(start, start + TILE_KEYS)
        seen = key <= last[:, None]
        found = kv[(first[:, None] + key).clamp(max=len(kv) - 1)]
        yield found.masked_fill(~seen[..., None], 0.0), seen
