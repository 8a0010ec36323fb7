"""The backends that attend over the latent with this package's own kernels, and when they can.

Which query sees which key goes to the kernels as tables of integers, made once per layout of
sequences and kept on the device.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from absorbed_mla.core_attention.by_identity import cached_by_identity
from absorbed_mla.core_attention.determinism import is_demanded
from absorbed_mla.core_attention.device_table import in_use, to_device
from absorbed_mla.core_attention.masks import tiles
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient
from absorbed_mla.kernels import operators
from absorbed_mla.kernels.triton import launch

if TYPE_CHECKING:
    from absorbed_mla.core_attention.backend import AttentionRequest

logger = logging.getLogger(__name__)

# Rows, heads of tokens, in a tile of the kernels for Hopper.
_HOPPER_ROWS = 64
_HOPPER_CONTENT = (128, 256, 512)
_HOPPER_ROPE = (32, 64)
_OLDEST_TRITON = (3, 6)
# Kept on the device: a table of a million tokens with a tile for each takes 20 MiB.
_TABLES = 16
_logged: set[str] = set()


class LatentKernelBackend:
    """An attention backend made of kernels that attend over the latent.

    Args:
        name: ``"triton"`` for the portable kernels, ``"hopper"`` for those of compute capability
            9.0, whose backward is not deterministic: the portable one computes it where
            ``torch.use_deterministic_algorithms`` asks for it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def forward(self, operands: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        """See ``reference_forward``; the output is in the dtype of the query."""
        q_content, q_rope, k_content, k_rope, _ = operands
        out, lse = operators.latent_attention_forward(
            q_content,
            q_rope,
            k_content.squeeze(2),
            k_rope,
            _query_tiles(self.name, operands, rules.spans),
            rules.scale,
            self.name,
        )
        return AttentionOutput(out, lse)

    def backward(
        self,
        grad: OutputGradient,
        attended: AttentionOutput,
        operands: AttentionInputs,
        rules: ScoreRules,
    ) -> AttentionInputs:
        """See ``reference_backward``; gradients of the query are in its dtype."""
        q_content, q_rope, k_content, k_rope, _ = operands
        name = self._backward_name()
        key_tiles, layers = None, 1
        if name == "triton":
            key_tiles, layers = _key_tiles(operands, rules.spans)
        dq_content, dq_rope, dkv = operators.latent_attention_backward(
            grad.out,
            grad.lse,
            attended.out,
            attended.lse,
            q_content,
            q_rope,
            k_content.squeeze(2),
            k_rope,
            _query_tiles(name, operands, rules.spans),
            key_tiles,
            layers,
            rules.scale,
            name,
        )
        width = k_content.shape[-1]
        return AttentionInputs(
            dq_content, dq_rope, dkv[..., :width].unsqueeze(2), dkv[..., width:], None
        )

    def _backward_name(self) -> str:
        if self.name == "hopper" and is_demanded():
            _log_once("deterministic algorithms are on: 'triton' computes the backward of 'hopper'")
            return "triton"
        return self.name


def triton_refuses(request: AttentionRequest) -> str | None:
    """Why the portable kernels cannot do this, or None."""
    content, rope = request.value_width, request.key_width - request.value_width
    interpreted = request.device.type == "cpu" and _interpreter_is_on()
    # On a GPU, fp32 runs without tensor cores, slower than the reference.
    reason = _refuses(request, (torch.float32,) if interpreted else ())
    if reason is None and not (_fits(content) and (not rope or _fits(rope))):
        reason = f"widths {content} (latent) and {rope} (rope) are not powers of two from 16"
    if reason is not None or interpreted:
        return reason
    reason = _device_refuses(request.device, lambda capability: capability >= (8, 0), "8.0")
    reason = reason or _triton_refuses_version(None)
    return reason or _too_long(request.dtype, content, rope, request.device)


def hopper_refuses(request: AttentionRequest) -> str | None:
    """Why the kernels for Hopper cannot do this, or None."""
    content, rope = request.value_width, request.key_width - request.value_width
    reason = "it needs a GPU" if request.device.type != "cuda" else _refuses(request)
    if reason is None and not (content in _HOPPER_CONTENT and rope in _HOPPER_ROPE):
        known = f"{_HOPPER_CONTENT} and {_HOPPER_ROPE}"
        reason = f"widths {content} (latent) and {rope} (rope) are not among {known}"
    reason = reason or _device_refuses(request.device, lambda found: found == (9, 0), "9.0")
    return reason or _triton_refuses_version((3, 8))


def _refuses(request: AttentionRequest, more_dtypes: tuple[torch.dtype, ...] = ()) -> str | None:
    """Why no kernel here can do this, on any device, or None."""
    checks = {
        "it computes in fp16 and bf16": request.dtype
        not in (torch.float16, torch.bfloat16, *more_dtypes),
        "it attends over the latent (form='absorbed')": not request.latent,
        "it takes no attention_mask": request.masked,
        "it drops nothing (attention_dropout=0)": request.dropout,
    }
    return next((reason for reason, holds in checks.items() if holds), None)


def _device_refuses(
    device: torch.device, suits: Callable[[tuple[int, int]], bool], needed: str
) -> str | None:
    if device.type != "cuda":
        return "it needs a GPU"
    if torch.version.hip:  # where "9.0" is something else
        return "it needs an NVIDIA GPU"
    if not suits(torch.cuda.get_device_capability(device)):
        return f"it needs compute capability {needed}"
    return None


def _triton_refuses_version(below: tuple[int, int] | None) -> str | None:
    """Why the installed Triton is not one that the kernels were run with, or None."""
    try:
        found = importlib.import_module("triton").__version__
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    version = tuple(int(part) for part in found.split(".")[:2])
    if version < _OLDEST_TRITON or (below is not None and version >= below):
        limit = f" and below {below[0]}.{below[1]}" if below else ""
        return f"it needs Triton 3.6 or newer{limit}; {found} is installed"
    return None


def _interpreter_is_on() -> bool:
    """Whether Triton runs kernels on the CPU, which somebody asks for only to test them."""
    try:
        return bool(importlib.import_module("triton").knobs.runtime.interpret)
    except (ImportError, AttributeError):
        return False


def _fits(width: int) -> bool:
    return width >= 16 and width & (width - 1) == 0


def _too_long(dtype: torch.dtype, content: int, rope: int, device: torch.device) -> str | None:
    try:
        launch.launch_for(dtype, content, rope, device)
    except ValueError as error:
        return str(error)
    return None


def _query_tiles(kernel: str, operands: AttentionInputs, spans: tuple[Span, ...]) -> Tensor:
    q_content = operands.q_content
    heads = q_content.shape[2]
    if kernel == "triton":
        tokens = _portable_launch(operands).query_tokens(heads)
    else:
        tokens = _HOPPER_ROWS // min(heads & -heads, _HOPPER_ROWS)
    return in_use(_query_table(spans, tokens, len(q_content), q_content.device))


def _key_tiles(operands: AttentionInputs, spans: tuple[Span, ...]) -> tuple[Tensor, int]:
    k_content = operands.k_content
    tokens = _portable_launch(operands).key_tokens
    table, layers = _key_table(spans, tokens, len(k_content), k_content.device)
    return in_use(table), layers


def _portable_launch(operands: AttentionInputs) -> launch.Launch:
    q_content, q_rope = operands.q_content, operands.q_rope
    return launch.launch_for(
        q_content.dtype, q_content.shape[-1], q_rope.shape[-1], q_content.device
    )


@cached_by_identity(maxsize=_TABLES)
def _query_table(spans: tuple[Span, ...], tokens: int, length: int, device: torch.device) -> Tensor:
    return to_device(lambda: tiles.query_tiles(spans, tokens, length), device)


@cached_by_identity(maxsize=_TABLES)
def _key_table(
    spans: tuple[Span, ...], tokens: int, length: int, device: torch.device
) -> tuple[Tensor, int]:
    """The table, and the number of its layers."""
    table = tiles.key_tiles(spans, tokens, length)
    layers = int(table[:, 5].max()) + 1 if len(table) else 1
    return to_device(table.clone, device), layers


def _log_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        logger.info(message)
