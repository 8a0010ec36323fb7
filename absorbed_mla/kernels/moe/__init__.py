"""Triton kernels of grouped experts: few launches, and each token read once."""
