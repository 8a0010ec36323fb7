"""The indexer's work for some queries: scores of all keys that they see, and the choice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.dsa.fp8_rows import fp8_query
from absorbed_mla.dsa.index_vectors import IndexVectors
from absorbed_mla.dsa.key_subset import visible_keys
from absorbed_mla.dsa.selection import select
from absorbed_mla.dsa.selection_triton import ELEMENTS, chunk_queries, triton_index_scores
from absorbed_mla.registry import INDEXER_BACKENDS
from benchmarks.kit.timing import Repeated

# Queries in the middle of the sequence.
_INDEXED = 1024


def indexer_work(
    backend: str, heads: int, keys: int, topk: int, dtype: torch.dtype, make: torch.Generator
) -> tuple[Callable[[], Any], dict]:
    """Scores and choice for queries in the middle of a sequence of so many keys.

    Args:
        backend: Name of one that runs Triton's kernels.
        heads: Of the indexer.
        keys: Of the sequence.
        topk: Keys to choose.
        dtype: Of queries and keys.
        make: Random numbers, on the device.

    Returns:
        What is repeated, and for how many ``queries``, ``flops`` of the scores, whether the choice
        is ``exact``, that of the reference from the same scores, its ``agreement`` with that of
        scores in fp32, and ``scores_ms`` of the scores alone.
    """
    device, on_gpu = make.device, make.device.type == "cuda"
    random = partial(torch.randn, device=device, generator=make)
    count, width = min(_INDEXED, keys // 4), 128 if on_gpu else 32
    index = IndexVectors(
        random(count, 1, heads, width).to(dtype),
        random(keys, 1, width).to(dtype),
        random(count, 1, heads),
    )
    offset = (keys - count) // 2
    spans = Spans([Span(0, count, 0, offset + count, offset)])
    run = partial(INDEXER_BACKENDS[backend].select, index, spans, topk, relu=True, tp_group=None)
    scored = index
    if backend == "triton_fp8":
        query, weights = fp8_query(index.query, index.weights)
        scored = index._replace(query=query, weights=weights)
    chosen = run()
    exact = torch.equal(chosen, select(scored, spans, topk, relu=True, scores=triton_index_scores))
    agreement = _agreement(chosen, select(index, spans, topk, relu=True), keys)
    flops = 2.0 * heads * width * count * (offset + (count + 1) / 2)
    chunk = next(iter(visible_keys(spans, 1, device, ELEMENTS, chunk_queries(None))))
    scores = Repeated(lambda: triton_index_scores(scored, chunk, True), on_gpu=on_gpu)
    alone = scores.times(scores.once(), 0.1)[0].median * count / chunk.span.num_queries
    more = {"queries": count, "flops": flops, "exact": exact, "agreement": agreement}
    return run, more | {"scores_ms": alone * 1e3}


def _agreement(chosen: torch.Tensor, expected: torch.Tensor, keys: int) -> float:
    """Share of the keys in ``chosen`` [Q, 1, topk] that are in ``expected``; all have topk keys."""
    among = torch.zeros(len(chosen), keys, dtype=torch.bool, device=chosen.device)
    among.scatter_(1, expected[:, 0].long(), True)
    return among.gather(1, chosen[:, 0].long()).float().mean().item()
