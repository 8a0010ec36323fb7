"""Every tensor-parallel size: ``torchrun --nproc-per-node N -m pytest tests/distributed``."""
