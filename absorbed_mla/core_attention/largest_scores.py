"""The largest score of every head, found by a search, for backends that return the LSE alone.

With n scores in a row, max <= LSE <= max + log(n). Rows whose LSE is below a score that was already
found, or below the threshold, are left out; the scores of the others are computed again. So the
result is exact where it is above the threshold, and the cost is between reading the LSE and, where
no row can be left out, one of the two products of the attention's forward.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from absorbed_mla.core_attention.device_table import in_use, to_device
from absorbed_mla.core_attention.latent_kernels import why_not_triton_version
from absorbed_mla.core_attention.masks import tiles
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Spans


def why_not_search() -> str | None:
    """Why the largest scores cannot be searched here, or None."""
    reason = why_not_triton_version(below=None)
    return f"{reason} (for qk_clip, log_max_attention_logit)" if reason else None


def record_by_search(q: Tensor, k: Tensor, lse: Tensor, rules: ScoreRules) -> None:
    """Record the largest scores of the heads in ``rules.max_logits``, if they are wanted.

    Args:
        q: [S_q, B, N, D].
        k: [S_k, B, N, D].
        lse: Over all keys that ``rules.spans`` let a query see, [S_q, B, N]; anything for queries
            in no span. Queries whose LSE is NaN are left out.
        rules: Without mask and dropout.
    """
    if rules.max_logits is None or not rules.spans:
        return
    heads = rules.max_logits.heads(rules.first_head, q.shape[2])
    threshold = rules.max_logits.threshold
    if _by_kernel(q, heads):
        # Loaded where it runs: elsewhere the package does without Triton.
        kernel = importlib.import_module("absorbed_mla.kernels.largest_scores")
        table = query_tile_table(rules.spans, kernel.QUERIES, q.device)
        kernel.largest_scores(q, k, lse, heads, table, rules.scale, threshold)
    else:
        _search(q, k, lse, heads, rules, threshold)


def _by_kernel(q: Tensor, heads: Tensor) -> bool:
    fits = q.dtype in (torch.float16, torch.bfloat16) and heads.dtype == torch.float32
    return q.is_cuda and fits


def query_tile_table(spans: Spans, size: int, device: torch.device) -> Tensor:
    """The tiles of the queries in ``spans``, those with the most keys first."""
    return in_use(
        spans.tables.get(
            ("tiles of queries in spans", size, device),
            lambda: to_device(lambda: tiles.query_tiles(spans, size), device),
        )
    )


def _search(
    q: Tensor, k: Tensor, lse: Tensor, heads: Tensor, rules: ScoreRules, threshold: float
) -> None:
    """What the kernel records, in PyTorch."""
    wide = torch.promote_types(q.dtype, torch.float32)
    for chunk in rules.chunks():
        if not chunk.num_keys:
            continue
        rows, columns = q[chunk.queries].to(wide), k[chunk.keys].to(wide)
        scores = rules.mask(torch.einsum("qbnd,kbnd->bnqk", rows, columns) * rules.scale, chunk)
        bound = lse[chunk.queries].amax((0, 1)).to(heads.dtype)
        exact = scores.amax((0, 2, 3)).to(heads.dtype)
        torch.maximum(heads, torch.where(bound > threshold, exact, bound), out=heads)
