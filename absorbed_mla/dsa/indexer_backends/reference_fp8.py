"""The indexer's selection by scores in FP8, in plain PyTorch."""

from __future__ import annotations

from functools import partial

import torch

from absorbed_mla.dsa.backend import SparseRequest
from absorbed_mla.dsa.cached_selection import select_cached
from absorbed_mla.dsa.fp8_rows import rounded_to_fp8
from absorbed_mla.dsa.indexer_loss import indexer_loss
from absorbed_mla.dsa.scores import index_scores
from absorbed_mla.dsa.selection import select

_scores = partial(index_scores, rounded=rounded_to_fp8)


class ReferenceFp8Backend:
    """Queries and keys are rounded to e4m3 (``dsa/fp8_rows.py``) to choose by; the loss is not."""

    name = "reference_fp8"
    summary = "plain PyTorch, chooses by queries and keys rounded to e4m3; the loss as it is"
    speed = 0.5  # another result, so only by name
    select = staticmethod(partial(select, scores=_scores))
    select_cached = staticmethod(partial(select_cached, scores=_scores))
    loss = staticmethod(indexer_loss)
    gathers_keys = True

    def why_not(self, request: SparseRequest) -> str | None:
        """See ``IndexerBackend``."""
        if request.dtype is torch.float64:
            return "it rounds to fp8: the dtype must be fp32, bf16 or fp16, it is float64"
        return None


ENTRY = ReferenceFp8Backend()
