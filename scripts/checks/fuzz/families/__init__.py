"""Families of kernels, one file each: how a configuration is drawn, and what a case computes.

A file ends with ``FAMILIES``. Its references are PyTorch in fp64 and share nothing with kernels.
"""
