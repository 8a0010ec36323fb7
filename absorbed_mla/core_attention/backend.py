"""Which implementation computes the attention, and why another one cannot."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch

from absorbed_mla.core_attention import flash_attention
from absorbed_mla.core_attention.cudnn import CudnnKernel
from absorbed_mla.core_attention.flash_attention import FlashAttention4
from absorbed_mla.core_attention.fused import FusedBackend
from absorbed_mla.core_attention.operands import Attended, AttendedGradient, Operands
from absorbed_mla.core_attention.reference import reference_backward, reference_forward
from absorbed_mla.core_attention.scores import ScoreRules

logger = logging.getLogger(__name__)


class AttentionBackend(Protocol):
    """Computes attention, without autograd.

    The contract of its two functions is that of :func:`reference_forward` and
    :func:`reference_backward`. Results may be in a lower precision than the reference's.
    """

    name: str

    def forward(self, operands: Operands, rules: ScoreRules) -> Attended:
        """Output and LSE."""
        ...

    def backward(
        self, grad: AttendedGradient, attended: Attended, operands: Operands, rules: ScoreRules
    ) -> Operands:
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
    """

    device: torch.device
    dtype: torch.dtype
    key_width: int
    value_width: int
    latent: bool
    masked: bool
    dropout: bool


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


def _flash_attention_refuses(request: AttentionRequest) -> str | None:
    """Why FlashAttention-4 cannot do this, or None."""
    reason = _fused_refuses(request) or flash_attention.refusal(
        request.key_width, request.value_width
    )
    if reason is None and torch.cuda.get_device_capability(request.device)[0] != 9:
        reason = "it was tried on compute capability 9.0 only"
    return reason


# Fastest first; each with the reason why it cannot run, or None.
_BACKENDS: dict[str, tuple] = {
    "flash_attention_4": (FlashAttention4(), _flash_attention_refuses),
    "cudnn": (FusedBackend("cudnn", CudnnKernel()), _fused_refuses),
    "reference": (ReferenceBackend(), lambda request: None),
}
_logged: set[str] = set()


def select_backend(name: str, request: AttentionRequest) -> AttentionBackend:
    """The backend called ``name``; ``"auto"`` takes the fastest that can run, logged once.

    Raises:
        ValueError: If there is no backend of that name, or it cannot run.
    """
    if name == "auto":
        return _fastest(request)
    if name not in _BACKENDS:
        raise ValueError(
            f"core_attention_backend must be one of auto, {', '.join(_BACKENDS)}; got {name!r}"
        )
    backend, refuses = _BACKENDS[name]
    reason = refuses(request)
    if reason is not None:
        raise ValueError(f"core_attention_backend={name!r} cannot run here: {reason}")
    return backend


def _fastest(request: AttentionRequest) -> AttentionBackend:
    refused: list[str] = []
    for name, (backend, refuses) in _BACKENDS.items():
        reason = refuses(request)
        if reason is None:
            _log_once(name, refused)
            return backend
        refused.append(f"{name}: {reason}")
    raise AssertionError("the reference refuses nothing")


def _log_once(name: str, refused: list[str]) -> None:
    message = f"core_attention_backend='auto' runs {name}"
    if refused:
        message += f" ({'; '.join(refused)})"
    if message not in _logged:
        _logged.add(message)
        logger.info(message)
