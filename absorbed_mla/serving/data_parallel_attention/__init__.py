"""Data-parallel attention: every rank has whole attention, and shards of all other weights.

Each rank has requests, a cache and attention of its own. Dense MLPs, experts, embedding and output
layer are divided, so for these the ranks exchange tokens: what a layer computes, it computes for
the tokens of all ranks. For inference only.
"""
