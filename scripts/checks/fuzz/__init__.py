"""Random cases of every kernel on a GPU against plain PyTorch in fp64; see ``fuzz_gpu.py``."""
