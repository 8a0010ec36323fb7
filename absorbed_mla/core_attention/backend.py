"""Which implementation computes the attention, and why another one cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from absorbed_mla.core_attention.backends import flash_attention_4 as flash_attention
from absorbed_mla.core_attention.backends import transformer_engine
from absorbed_mla.core_attention.backends.cudnn import CudnnKernel
from absorbed_mla.core_attention.backends.flash_attention_3 import (
    FlashAttention3,
    flash_attention_3_refuses,
)
from absorbed_mla.core_attention.backends.flash_attention_4 import FlashAttention4
from absorbed_mla.core_attention.backends.fused import FusedBackend
from absorbed_mla.core_attention.backends.reference import reference_backward, reference_forward
from absorbed_mla.core_attention.backends.transformer_engine import TransformerEngineAttention
from absorbed_mla.core_attention.determinism import is_demanded
from absorbed_mla.core_attention.latent_kernels import (
    LatentKernelBackend,
    hopper_refuses,
    triton_refuses,
)
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient


class AttentionBackend(Protocol):
    """Computes attention, without autograd.

    The contract of its two functions is that of :func:`reference_forward` and
    :func:`reference_backward`. Results may be in a lower precision than the reference's.
    """

    name: str

    def forward(self, operands: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        """Output and LSE."""
        ...

    def backward(
        self,
        grad: OutputGradient,
        attended: AttentionOutput,
        operands: AttentionInputs,
        rules: ScoreRules,
    ) -> AttentionInputs:
        """Gradients of the operands."""
        ...


@dataclass(frozen=True)
class AttentionRequest:
    """What a backend must be able to do for one call.

    Attributes:
        device: Where.
        dtype: Of the operands.
        key_width: Of query and key, content and rope together.
        value_width: Of the value.
        latent: Whether all heads share one key, which is the value too.
        masked: Whether there is an attention mask.
        dropout: Whether probabilities are dropped.
        packed: Whether a call may hold several sequences, or several pieces of one, whose gradients
            are wanted: packs and context parallelism. Over a cache there are no gradients.
    """

    device: torch.device
    dtype: torch.dtype
    key_width: int
    value_width: int
    latent: bool
    masked: bool
    dropout: bool
    packed: bool = False


class ReferenceBackend:
    """Plain PyTorch, any device, dtype, mask and layout."""

    name = "reference"
    forward = staticmethod(reference_forward)
    backward = staticmethod(reference_backward)


def _fused_refuses(request: AttentionRequest) -> str | None:
    """Why no fused kernel for keys and values of every head can do this, or None."""
    widths = (request.key_width, request.value_width)
    checks = {
        "it needs a GPU": request.device.type != "cuda",
        "it computes in fp16 and bf16": request.dtype not in (torch.float16, torch.bfloat16),
        "it needs keys and values of every head (form='expanded')": request.latent,
        "it takes no attention_mask here": request.masked,
        "it drops nothing here (attention_dropout=0)": request.dropout,
        f"head widths {widths} are not multiples of 8 up to 256": any(
            width % 8 or width > 256 for width in widths
        ),
    }
    reasons = [reason for reason, holds in checks.items() if holds]
    if not reasons and torch.cuda.get_device_capability(request.device) < (9, 0):
        reasons = ["it needs compute capability 9.0"]
    return reasons[0] if reasons else None


def _cudnn_refuses(request: AttentionRequest) -> str | None:
    """Why cuDNN cannot do this, or None."""
    if is_demanded():
        return "its backward is not deterministic, which torch.use_deterministic_algorithms demands"
    return _fused_refuses(request)


def _flash_attention_refuses(request: AttentionRequest) -> str | None:
    """Why FlashAttention-4 cannot do this, or None."""
    reason = _fused_refuses(request) or flash_attention.refusal(
        request.key_width, request.value_width
    )
    if reason is None and torch.cuda.get_device_capability(request.device)[0] != 9:
        reason = "it was tried on compute capability 9.0 only"
    return reason


def _transformer_engine_refuses(request: AttentionRequest) -> str | None:
    """Why TransformerEngine cannot do this, or None."""
    return _fused_refuses(request) or transformer_engine.refusal(
        request.key_width, request.value_width, request.dtype, is_demanded(), request.packed
    )


# Of each form the fastest first; each with the reason why it cannot run, or None.
_BACKENDS: dict[str, tuple] = {
    "flash_attention_4": (FlashAttention4(), _flash_attention_refuses),
    "cudnn": (FusedBackend("cudnn", CudnnKernel()), _cudnn_refuses),
    "transformer_engine": (TransformerEngineAttention(), _transformer_engine_refuses),
    "flash_attention_3": (FlashAttention3(), flash_attention_3_refuses),
    "hopper": (LatentKernelBackend("hopper"), hopper_refuses),
    "triton": (LatentKernelBackend("triton"), triton_refuses),
    "reference": (ReferenceBackend(), lambda request: None),
}


def examine(name: str, request: AttentionRequest) -> tuple[list[AttentionBackend], dict[str, str]]:
    """The backends that can do this, and why the others cannot, by name.

    Args:
        name: The only one to examine, or ``"auto"`` for all.
        request: What must be done.

    Raises:
        ValueError: If there is no backend of that name.
    """
    return examine_table("core_attention_backend", _BACKENDS, name, request)


def examine_table(
    option: str, backends: Mapping[str, tuple], name: str, request: Any
) -> tuple[list, dict[str, str]]:
    """The backends of a table that can do this, and why the others cannot, by name.

    Args:
        option: What users choose by.
        backends: Name -> (backend, function that says why it cannot do a request, or None).
        name: The only one to examine, or ``"auto"`` for all.
        request: What must be done.

    Raises:
        ValueError: If there is no backend of that name.
    """
    if name != "auto" and name not in backends:
        raise ValueError(f"{option} must be one of auto, {', '.join(backends)}; got {name!r}")
    runnable, refused = [], {}
    for each in backends if name == "auto" else (name,):
        backend, refuses = backends[each]
        reason = refuses(request)
        if reason is None:
            runnable.append(backend)
        else:
            refused[each] = reason
    return runnable, refused
