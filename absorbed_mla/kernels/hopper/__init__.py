"""Kernels for Hopper GPUs (compute capability 9.0), in Gluon.

Importing this package loads neither Triton nor anything that needs a GPU; its modules do.
"""
