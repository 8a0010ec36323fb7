"""Triton kernels of grouped experts (``absorbed_mla/serving/experts``): few launches, and each row once."""
