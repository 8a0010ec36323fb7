"""Head weights of DSA indexers in the dtype of the checkpoint."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

import torch
from torch import nn

from absorbed_mla.dsa.indexer import Indexer
from checkpoint_conversion.indexer import HEAD_WEIGHTS
from checkpoint_conversion.lazy_tensor import LazyTensor

_logger = logging.getLogger(__name__)


def keep_head_weights(
    model: nn.Module, tensors: Mapping[str, LazyTensor], dtype: torch.dtype, *, parity: bool
) -> None:
    """Let the indexers of a rounded model hold their head weights as they are stored.

    Rounded ones select other keys; transformers keeps them in float32 too.

    Args:
        model: Its weights are not yet set.
        tensors: Of the checkpoint, under Hugging Face's names.
        dtype: Of the model's other weights.
        parity: Whether the model must have the log-probs of training, which rounds them. Then they
            are rounded, with a warning.
    """
    stored = {tensor.dtype for name, tensor in tensors.items() if name.endswith(HEAD_WEIGHTS)}
    wide = functools.reduce(torch.promote_types, stored, dtype)
    if wide == dtype:
        return
    if parity:
        _logger.warning(
            f"the indexers' weights_proj, {wide} in the checkpoint, is rounded to {dtype}: parity "
            "mode agrees with training, which holds it so"
        )
        return
    for module in model.modules():
        if isinstance(module, Indexer):
            module.hold_head_weights(wide)
