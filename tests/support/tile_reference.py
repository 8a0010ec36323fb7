"""A backend of the expanded form that knows which query sees which key from the tile table only."""

import torch
from torch import Tensor

from absorbed_mla.core_attention.latent_kernels import query_tile_table
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput


class TileReference:
    """Runs on a CPU and reads no number on the host, as kernels do."""

    reads_device_spans = True

    def __init__(self, size: int = 16) -> None:
        self.size = size
        self.rates = {"cpu": (1.0, 1.0)}
        # Kinds of spans that it was called with.
        self.kinds: set[str] = set()

    def forward(self, inputs: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        """Queries in no tile get NaN: a kernel would not write them."""
        self.kinds.add(type(rules.spans).__name__)
        q, k, v = inputs.as_multi_head()
        table = query_tile_table(rules.spans, self.size, len(q), q.device)
        written, seen = _visible(table, len(q), len(k))
        scores = torch.einsum("qbnd,kbnd->bnqk", q, k).double() * rules.scale
        scores = scores.masked_fill(~seen, -torch.inf)
        lse = scores.logsumexp(3)
        probs = (scores - lse[..., None]).exp().nan_to_num(0.0)
        out = torch.einsum("bnqk,kbnv->qbnv", probs, v.double())
        out = torch.where(written[:, None, None, None], out, torch.nan)
        return AttentionOutput(out.to(q.dtype), lse.permute(2, 0, 1).to(torch.float32))


def _visible(table: Tensor, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Which queries are in a tile [Q], and which of them see which key [Q, K]."""
    start, end, key_start, key_end, offset = table.long()[:, :, None].unbind(1)
    query, key = torch.arange(queries), torch.arange(keys)
    inside = (start <= query) & (query < end)
    there = (key_start <= key) & (key < key_end)
    below = (key - key_start)[:, None] <= (query - start + offset)[:, :, None]
    seen = inside[:, :, None] & there[:, None] & below
    return inside.any(0), seen.any(0)
