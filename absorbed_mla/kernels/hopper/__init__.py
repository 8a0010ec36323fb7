"""Kernels for Hopper GPUs (compute capability 9.0), in Gluon.

``forward.py`` and ``backward.py`` launch ``forward_kernel.py`` and ``backward_kernel.py``, whose
docstrings say how the work is laid out in time and memory; read these first. Both share the tile
(``tile.py``), its layouts in registers (``layouts.py``) and the tensor maps (``tensor_map.py``).
``decode.py`` launches ``decode_kernel.py``, the forward over a paged cache.

Importing this package loads neither Triton nor anything that needs a GPU; its modules do.
"""
