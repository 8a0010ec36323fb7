"""Data-parallel attention: whole attention on every rank, all other weights divided over the ranks.

Each rank has requests, a cache and attention of its own. Dense MLPs, experts, embedding and output
layer are divided, so for these the ranks exchange tokens: what a layer computes, it computes for
the tokens of all ranks. For inference only.
"""

from __future__ import annotations
