"""Megatron-Core's inference engines on a machine without a GPU."""

from __future__ import annotations

import torch

from absorbed_mla.cpu_host import enable_cpu_host


def enable_cpu_inference() -> bool:
    """Call :func:`enable_cpu_host` and replace Triton kernels of Megatron's inference engines.

    Speculative decoding needs them; everything else runs after ``enable_cpu_host`` alone.

    Returns:
        True if the process now runs on the CPU, False if a GPU is there and nothing was changed.
    """
    if torch.cuda.is_available():
        return False
    enable_cpu_host()
    from megatron.core.inference.text_generation_controllers import (
        mtp_utils_pytorch,
        text_generation_controller,
    )

    # Megatron has these two in PyTorch as well.
    for name in ("verify_speculative_tokens", "prepare_next_forward_pass"):
        setattr(text_generation_controller, name, getattr(mtp_utils_pytorch, name))
    return True
