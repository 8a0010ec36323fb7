"""Attention kernels, and the tables that tell them which query sees which key.

``tiles.py`` cuts spans into tables of integers; ``portable/`` is plain Triton, also for its
interpreter on the CPU; ``hopper/`` is Gluon for compute capability 9.0. All of it is free of
autograd and of the rest of the package; importing this module loads neither kernels nor Triton.
"""
