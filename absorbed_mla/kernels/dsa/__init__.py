"""Kernels of DeepSeek Sparse Attention: attention over chosen keys, the indexer, its loss.

All of them are plain Triton for compute capability 8.0 or newer; ``absorbed_mla/kernels/hopper``
has the sparse attention in Gluon for Hopper. Both walk lists of keys (``key_lists.py``), one list
for each tile of tokens, so that neighbouring tokens of few heads share what they load.

Importing this package does not load Triton; its modules do.
"""
