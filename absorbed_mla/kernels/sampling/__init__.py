"""Sampling kernels in Triton for ``absorbed_mla/serving``: few launches, no sort.

Every row of logits is cut into blocks of :data:`vocabulary_blocks.BLOCK` tokens, a program for
each, so that few rows keep a GPU busy, too. What blocks add up are integers, whose sums are exact
in any order: a row's token depends neither on the other rows nor on their number.
"""
