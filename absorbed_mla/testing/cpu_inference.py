"""Run Megatron-Core's inference engines on a machine without a GPU."""

from __future__ import annotations

import torch

from absorbed_mla.testing.cpu_host import enable_cpu_host


def enable_cpu_inference() -> bool:
    """:func:`enable_cpu_host`, and Megatron's own PyTorch in place of its Triton for inference.

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

    # Of speculative decoding; the other two are not imported, or for Mamba.
    for name in ("verify_speculative_tokens", "prepare_next_forward_pass"):
        setattr(text_generation_controller, name, getattr(mtp_utils_pytorch, name))
    return True
