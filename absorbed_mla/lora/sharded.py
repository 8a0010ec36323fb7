"""The adapter of a model alone as a distributed checkpoint, which fits every parallel size.

With the base, it is in the model's own: ``model.sharded_state_dict()``.
"""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from torch import nn

from absorbed_mla.checkpoint.distributed import model_sharded_state_dict
from absorbed_mla.lora.model import IN_NAMES


def lora_sharded_state_dict(model: nn.Module) -> ShardedStateDict:
    """The entries of A and B in ``model.sharded_state_dict()``, layers by their numbers.

    Raises:
        ValueError: If the model has no LoRA, or it is merged.
    """
    entries = model_sharded_state_dict(model)
    found = {key: entry for key, entry in entries.items() if IN_NAMES in key}
    if not found and model.config.pipeline_model_parallel_size == 1:
        raise ValueError("the model has no LoRA: add_lora first")
    return found


def save_lora_weights(model: nn.Module, checkpoint_dir: str | Path) -> None:
    """Write A and B of a model; collective.

    Args:
        model: Not wrapped for DDP.
        checkpoint_dir: An existing empty folder.

    Raises:
        ValueError: As :func:`lora_sharded_state_dict`.
    """
    dist_checkpointing.save(lora_sharded_state_dict(model), str(checkpoint_dir))


@torch.no_grad()
def load_lora_weights(model: nn.Module, checkpoint_dir: str | Path) -> None:
    """Read A and B of a model that has LoRA of the same layers and ranks; collective.

    Args:
        model: Not wrapped for DDP.
        checkpoint_dir: From :func:`save_lora_weights`, or a checkpoint that has the base, too.

    Raises:
        ValueError: As :func:`lora_sharded_state_dict`.
    """
    loaded = dist_checkpointing.load(lora_sharded_state_dict(model), str(checkpoint_dir))
    for name, parameter in model.named_parameters():
        if IN_NAMES in name:
            parameter.copy_(loaded[name])
