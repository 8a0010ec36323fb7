"""Products and functions whose result for a row does not depend on the rows beside it.

``cpu.py`` takes the place of PyTorch's operators on the CPU, ``topk.py`` everywhere. Of Triton:
``matrix_product.py`` with the tiles of ``tiles.py``, ``grouped_product.py`` for experts, both with
the order of sums of ``parts.py``; ``product.py`` for heads that have a matrix each;
``rms_norm.py``. Importing this module loads none of them.
"""
