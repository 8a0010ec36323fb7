"""A whole GPT with absorbed MLA on this tensor-parallel rank, to generate with."""

from __future__ import annotations

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.checkpoint.distributed import load_model_weights
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from training.checkpoint_folder import find_checkpoint
from training.presets import ModelPreset


def absorbed_gpt(
    config: MLATransformerConfig,
    model: ModelPreset,
    options: AbsorbedMLAOptions,
    device: torch.device,
) -> GPTModel:
    """All layers, with random weights; ``config`` is told that latents will be cached."""
    config.cache_mla_latents = True
    options = options.replace(latent_norm_eps=model.latent_norm_eps)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_absorbed_mla_decoder_block_spec(
            config, backend=config.transformer_impl, options=options
        ),
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_position_embeddings,
        # MLA makes its own rotary embedding; "rope" only says that there is no learned table.
        position_embedding_type="rope",
    ).to(device)


def load_weights(gpt: GPTModel, folder: str) -> None:
    """The weights of a checkpoint, or of the newest one in a folder of train.py's; collective.

    Raises:
        ValueError: If there is none, or it does not hold this model.
    """
    path = find_checkpoint(folder)
    try:
        load_model_weights(gpt, path)
    except CheckpointingException as error:
        raise ValueError(f"--load: {path} cannot be read: {error}") from error
