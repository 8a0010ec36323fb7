"""FP8 training: TransformerEngine's linear layers quantize their operands, attention stays in bf16.

Megatron's ``fp8`` makes TransformerEngine's layers multiply in FP8; which scales they use
(``fp8_recipe``) is theirs. W_UK and W_UV are multiplied in the parameters' dtype in both forms, so
absorption never sees a quantized weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.extensions.transformer_engine import HAVE_TE, TELinear
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn


def refuse_unsupported_fp8(config: MLATransformerConfig, layer: nn.Module) -> None:
    """Refuse FP8 where linear layers would silently compute in bf16.

    Args:
        config: Of the attention; nothing is refused where ``fp8`` is off.
        layer: One of its linear layers, which all are of one package.

    Raises:
        ValueError: Naming the field and what it needs.
    """
    if config.fp8 and not (HAVE_TE and isinstance(layer, TELinear)):
        raise ValueError(
            f"fp8={config.fp8!r} needs TransformerEngine's linear layers, got "
            f"{type(layer).__name__}; build the spec with backend='transformer_engine'"
        )


def keep_original_input(*layers: nn.Module) -> None:
    """Let layers keep their input for backward, not an FP8 copy of it.

    That saves memory where the input is recomputed anyway, or kept by what computed it.
    """
    from megatron.core.extensions.transformer_engine import set_save_original_input

    for layer in layers:
        set_save_original_input(layer)


def dequantized(x: Tensor) -> Tensor:
    """``x``, or the values of an FP8 parameter in the dtype that it stands for."""
    return dequantize_fp8_tensor(x) if is_float8tensor(x) else x


@contextmanager
def without_fp8(config: MLATransformerConfig) -> Iterator[None]:
    """Let a model compute in its parameters' dtype.

    For generation: FP8 products need whole tiles of tokens, and the scale of one token's values
    would depend on the others of its batch.

    Args:
        config: The model's, which its blocks read in every forward.
    """
    fp8 = config.fp8
    config.fp8 = None
    try:
        yield
    finally:
        config.fp8 = fp8
