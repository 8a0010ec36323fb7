"""This package's Gluon kernels for Hopper (compute capability 9.0)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from absorbed_mla.core_attention.backend import DETERMINISM_REQUIRED, AttentionRequest
from absorbed_mla.core_attention.backends.triton import ENTRY as TRITON
from absorbed_mla.core_attention.latent_kernels import (
    LatentKernelBackend,
    why_not_device,
    why_not_latent_kernels,
    why_not_triton_version,
)
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient
from absorbed_mla.log_once import log_once

logger = logging.getLogger(__name__)
# Rows, heads of tokens, in a tile.
_ROWS = 64
_KV_LORA_RANKS = (128, 256, 512)
_ROPE_WIDTHS = (32, 64)


class HopperBackend(LatentKernelBackend):
    """Its backward adds with atomics.

    Where ``torch.use_deterministic_algorithms`` requires equal bits, the backend ``triton``
    computes it.
    """

    name = "hopper"
    summary = "this package's kernels for Hopper, kv_lora_rank 128, 256 or 512"
    rates: Mapping[str, tuple[float, float]] = {"NVIDIA H200": (640.0, 415.0)}

    def why_not(self, request: AttentionRequest) -> str | None:
        """See ``AttentionBackend``."""
        c, rope = request.value_width, request.key_width - request.value_width
        on_gpu = request.device.type == "cuda"
        reason = why_not_latent_kernels(request) if on_gpu else "it needs a GPU"
        if reason is None and not (c in _KV_LORA_RANKS and rope in _ROPE_WIDTHS):
            known = f"{_KV_LORA_RANKS} and {_ROPE_WIDTHS}"
            reason = f"widths {c} (latent) and {rope} (rope) are not among {known}"
        reason = reason or why_not_device(request.device, lambda found: found == (9, 0), "9.0")
        return reason or why_not_triton_version(below=(3, 8))

    def query_tile_size(self, inputs: AttentionInputs) -> int:
        """See ``LatentKernelBackend``."""
        heads = inputs.q_content.shape[2]
        return _ROWS // min(heads & -heads, _ROWS)

    def backward(
        self,
        grad: OutputGradient,
        output: AttentionOutput,
        inputs: AttentionInputs,
        rules: ScoreRules,
    ) -> AttentionInputs:
        """See ``LatentKernelBackend``."""
        if torch.get_deterministic_debug_mode() == DETERMINISM_REQUIRED:
            log_once(
                logger,
                "deterministic algorithms are on: 'triton' computes the backward of 'hopper'",
            )
            return TRITON.backward(grad, output, inputs, rules)
        return super().backward(grad, output, inputs, rules)


ENTRY = HopperBackend()
