"""Products and functions whose result for a row does not depend on the rows beside it.

``cpu.py`` takes the place of PyTorch's operators on the CPU, ``topk.py`` everywhere;
``product.py`` is a Triton kernel. Importing this module loads none of them.
"""
