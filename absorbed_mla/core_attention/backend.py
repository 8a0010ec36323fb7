"""Interface of attention backends: what a call asks of them, and what they compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient

# torch.get_deterministic_debug_mode() where ``torch.use_deterministic_algorithms`` is on, and not
# only to warn: equal bits in every run are required.
DETERMINISM_REQUIRED = 2


@dataclass(frozen=True)
class AttentionRequest:
    """What a backend must be able to do for one call.

    Attributes:
        form: ``"absorbed"``: all heads share one key, the latent, which is the value too; or
            ``"expanded"``: every head has its own key and value.
        device: Of the tensors.
        dtype: Of the tensors.
        key_width: Width of query and key, rope part included.
        value_width: Width of the value.
        masked: Whether there is an attention mask.
        dropout: Whether attention probabilities are dropped.
        packed: Whether a call may hold several sequences, or several parts of one, whose gradients
            are wanted: packs and context parallelism. Over a cache there are no gradients.
        deterministic: Whether ``torch.use_deterministic_algorithms`` requires equal bits in every
            run.
        max_logits: Whether the largest score of every head is wanted (``ScoreRules.max_logits``).
        small_max_logits: Whether exactly, also where it is below the threshold of QK-clip.
    """

    form: str
    device: torch.device
    dtype: torch.dtype
    key_width: int
    value_width: int
    masked: bool
    dropout: bool
    packed: bool = False
    deterministic: bool = False
    max_logits: bool = False
    small_max_logits: bool = False


class AttentionBackend(Protocol):
    """Computes attention and its gradient, without autograd. An entry of ``ATTENTION_BACKENDS``.

    The contract of ``forward`` and ``backward`` is that of ``reference_forward`` and
    ``reference_backward`` (``backends/reference.py``); results may have a lower precision.

    Attributes:
        name: As ``core_attention_backend`` names it; the name of the backend's file.
        summary: What it is and what it needs, for the support matrix.
        forms: The forms that it computes.
        rates: Measured TFLOP/s in bf16, forward and backward, by the name of the GPU. ``"gpu"`` and
            ``"cpu"`` are relative rates on every other machine; 1 where they are not given.
        searches_max_logits: Whether it computes scores again for the largest ones
            (``max_logits.py``), rather than record them in forward.
        reads_device_spans: Whether its forward takes ``DeviceSpans``.
        adds_query_gradients: Whether its backward takes spans of which a query is in several.
        windows: Whether it takes ``ScoreRules.window``.
        sinks: Whether it takes ``ScoreRules.sink``.
    """

    name: str
    summary: str
    forms: tuple[str, ...]
    rates: Mapping[str, tuple[float, float]]
    searches_max_logits: bool
    reads_device_spans: bool
    adds_query_gradients: bool
    windows: bool
    sinks: bool

    def why_not(self, request: AttentionRequest) -> str | None:
        """The reason why the backend cannot do what is requested here, or None."""
        ...

    def forward(self, inputs: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        """Output and LSE."""
        ...

    def backward(
        self,
        grad: OutputGradient,
        output: AttentionOutput,
        inputs: AttentionInputs,
        rules: ScoreRules,
    ) -> AttentionInputs:
        """Gradients of the inputs."""
        ...


def why_not_fused(request: AttentionRequest) -> str | None:
    """Why no fused multi-head kernel can do what is requested, or None.

    What cuDNN, FlashAttention-4 and TransformerEngine have in common.
    """
    widths = (request.key_width, request.value_width)
    checks = {
        "it needs a GPU": request.device.type != "cuda",
        "it computes in fp16 and bf16": request.dtype not in (torch.float16, torch.bfloat16),
        "it needs keys and values of every head (form='expanded')": request.form != "expanded",
        "it takes no attention_mask here": request.masked,
        "it drops nothing here (attention_dropout=0)": request.dropout,
        f"head widths {widths} are not multiples of 8 up to 256": any(
            width % 8 or width > 256 for width in widths
        ),
    }
    reason = next((reason for reason, holds in checks.items() if holds), None)
    if reason is None and torch.cuda.get_device_capability(request.device) < (9, 0):
        reason = "it needs compute capability 9.0"
    return reason
