"""This package's Triton kernels for any NVIDIA GPU from compute capability 8.0 on."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import torch
from torch import Tensor

from absorbed_mla.core_attention.backend import AttentionRequest
from absorbed_mla.core_attention.latent_kernels import (
    LatentKernelBackend,
    key_tile_table,
    why_not_device,
    why_not_latent_kernels,
    why_not_triton_version,
)
from absorbed_mla.core_attention.masks.spans import Spans
from absorbed_mla.core_attention.types import AttentionInputs
from absorbed_mla.kernels.triton import launch


class TritonBackend(LatentKernelBackend):
    """Deterministic: no atomics."""

    name = "triton"
    summary = "this package's Triton kernels, compute capability 8.0 or newer, deterministic"
    # On a CPU the kernels run in Triton's interpreter, for tests only.
    rates: Mapping[str, tuple[float, float]] = {"NVIDIA H200": (295.0, 170.0), "cpu": (1e-6, 1e-6)}

    def why_not(self, request: AttentionRequest) -> str | None:
        """See ``AttentionBackend``."""
        c, rope = request.value_width, request.key_width - request.value_width
        interpreted = request.device.type == "cpu" and _interpreter_is_on()
        # On a GPU, fp32 runs without tensor cores, slower than the reference.
        reason = why_not_latent_kernels(request, (torch.float32,) if interpreted else ())
        if reason is None and not (_fits(c) and (not rope or _fits(rope))):
            reason = f"widths {c} (latent) and {rope} (rope) are not powers of two from 16"
        if reason is not None or interpreted:
            return reason
        reason = why_not_device(request.device, lambda capability: capability >= (8, 0), "8.0")
        reason = reason or why_not_triton_version(below=None)
        return reason or _why_not_shared_memory(request.dtype, c, rope, request.device)

    def query_tile_size(self, inputs: AttentionInputs) -> int:
        """See ``LatentKernelBackend``."""
        return _launch_for(inputs).query_tokens(inputs.q_content.shape[2])

    def key_tiles(self, inputs: AttentionInputs, spans: Spans) -> tuple[Tensor, int]:
        """See ``LatentKernelBackend``."""
        keys, device = len(inputs.k_content), inputs.k_content.device
        return key_tile_table(spans, _launch_for(inputs).key_tokens, keys, device)


def _launch_for(inputs: AttentionInputs) -> launch.Launch:
    q_content, q_rope = inputs.q_content, inputs.q_rope
    return launch.launch_for(
        q_content.dtype, q_content.shape[-1], q_rope.shape[-1], q_content.device
    )


def _interpreter_is_on() -> bool:
    """Whether Triton's interpreter runs kernels on the CPU, as tests make it do."""
    try:
        return bool(importlib.import_module("triton").knobs.runtime.interpret)
    except (ImportError, AttributeError):
        return False


def _fits(width: int) -> bool:
    return width >= 16 and width & (width - 1) == 0


def _why_not_shared_memory(
    dtype: torch.dtype, c: int, rope: int, device: torch.device
) -> str | None:
    try:
        launch.launch_for(dtype, c, rope, device)
    except ValueError as error:
        return str(error)
    return None


ENTRY = TritonBackend()
