"""Triton kernels of grouped experts (``absorbed_mla/experts``): few launches, and each row once."""
