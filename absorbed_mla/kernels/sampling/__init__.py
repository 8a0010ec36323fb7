"""Triton kernels that draw tokens (``absorbed_mla/serving``): few launches, no sort.

Every row of logits is cut into pieces of :data:`pieces.PIECE` tokens, a program for each, so that
few rows keep a GPU busy, too. What pieces add up are integers, whose sums are exact in any order: a
row's token depends neither on the other rows nor on their number.
"""
