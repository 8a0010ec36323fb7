"""Head weights of DSA indexers in the dtype of the checkpoint."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

import torch
from torch import nn

from absorbed_mla.dsa.indexer import Indexer
from checkpoint_conversion.lazy_tensor import LazyTensor
from checkpoint_conversion.mapping import pairs
from checkpoint_conversion.mapping_table import HEAD_WEIGHTS
from checkpoint_conversion.model import ModelConfig

_logger = logging.getLogger(__name__)


def keep_head_weights(
    model: nn.Module,
    config: ModelConfig,
    tensors: Mapping[str, LazyTensor],
    dtype: torch.dtype,
    *,
    parity: bool,
) -> None:
    """Let the indexers of a rounded model hold their head weights as they are stored.

    Rounded ones select other keys; transformers keeps them in float32 too.

    Args:
        model: Its weights are not yet set.
        config: Of the checkpoint's model.
        tensors: Of the checkpoint, under Hugging Face's names.
        dtype: Of the model's other weights.
        parity: Whether the model must have the log-probs of training, which rounds them. Then they
            are rounded, with a warning.
    """
    own = [pair for pair in pairs(config) if pair.megatron.endswith(HEAD_WEIGHTS)]
    stored = {tensors[name].dtype for pair in own for name in pair.hugging_face}
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
