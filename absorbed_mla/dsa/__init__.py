"""DeepSeek Sparse Attention (DSA): an indexer chooses the keys that every query attends to.

DeepSeek-V3.2 (arXiv:2512.02556), section 2.1. Shape letters beside those of ``absorbed_mla.dims``:

    Hi    heads of the indexer
    Di    width of one of them
    topk  keys that a query attends to, at most

A selection is int32 [S_q, B, topk]: for every query the indices of its keys on the key axis of its
batch entry, ascending, then -1 where it sees fewer. Rows of queries and of keys are not assumed to
be the same tokens: ``Spans`` say which queries see which keys, so that the keys may be those of all
context-parallel ranks, or a cache.
"""
