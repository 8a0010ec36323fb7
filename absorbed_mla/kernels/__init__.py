"""Attention kernels, without autograd; they import nothing from the rest of the package.

``triton/`` holds plain Triton kernels, which also run in Triton's interpreter on the CPU;
``hopper/`` Gluon kernels for compute capability 9.0; ``paged/`` kernels over a paged cache;
``invariant/`` products and operators whose result for a token does not depend on the batch;
``sampling/`` draws tokens.
``operators.py`` makes PyTorch operators of them. Importing this module loads neither kernels nor
Triton.
"""
