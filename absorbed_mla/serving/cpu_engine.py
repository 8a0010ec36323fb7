"""Megatron-Core's inference engines on a machine without a GPU."""

from __future__ import annotations

import torch

from absorbed_mla.cpu_host import enable_cpu_host


def enable_cpu_inference() -> bool:
    """Call :func:`enable_cpu_host` and replace Triton kernels of Megatron's inference engines.

    Speculative decoding needs them; everything else runs after ``enable_cpu_host`` alone.

    Returns:
        True if the process now runs on the CPU, False if a GPU is there and nothing was changed.

    Raises:
        ValueError: If this release of Megatron lacks one of the kernels.
    """
    if torch.cuda.is_available():
        return False
    enable_cpu_host()
    # Imported here, after that has replaced what Megatron asks for.
    from megatron.core.inference.text_generation_controllers import (
        mtp_utils_pytorch,
        text_generation_controller,
    )

    from absorbed_mla.serving.megatron_engine.names import (
        CONTROLLERS,
        DRAFTS_ON_CPUS,
        KERNELS_OF_DRAFTS,
    )

    DRAFTS_ON_CPUS.require({CONTROLLERS: text_generation_controller})
    # Megatron has these in PyTorch as well.
    for kernel in KERNELS_OF_DRAFTS:
        kernel.replace(text_generation_controller, kernel.of(mtp_utils_pytorch))
    return True
