"""The model of a rollout: trained by Megatron's DDP, and ready to generate."""

from __future__ import annotations

import argparse

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.batch_invariant import enable_batch_invariant_mode
from absorbed_mla.distributed_checkpoint import load_model_weights
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from training.checkpoint import find_checkpoint
from training.model import build_config


def build_policy_model(args: argparse.Namespace, device: torch.device) -> DistributedDataParallel:
    """This rank's part of the model, with random weights or those of ``--load``; collective.

    Parity mode is switched on for the process if ``args`` ask for it.

    Raises:
        ValueError: If Megatron refuses the options, or the checkpoint does not hold this model.
    """
    preset = args.model
    if args.batch_invariant:
        enable_batch_invariant_mode(device.type)
    config = build_config(args, preset, device)
    config.cache_mla_latents = True
    options = AbsorbedMLAOptions(
        form=args.form,
        down_projection=args.down_projection,
        latent_norm_eps=preset.latent_norm_eps,
        batch_invariant=args.batch_invariant,
    )
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_absorbed_mla_decoder_block_spec(
            config, backend=config.transformer_impl, options=options
        ),
        vocab_size=preset.vocab_size,
        max_sequence_length=preset.max_position_embeddings,
        # MLA makes its own rotary embedding; "rope" only says that there is no learned table.
        position_embedding_type="rope",
    ).to(device)
    if args.load:
        _load(gpt, args.load)
    module = Float16Module(config, gpt) if args.bf16 else gpt
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module
    )
    config.no_sync_func = model.no_sync
    return model


def _load(gpt: GPTModel, folder: str) -> None:
    path = find_checkpoint(folder)
    try:
        load_model_weights(gpt, path)
    except CheckpointingException as error:
        raise ValueError(f"--load: {path} cannot be read: {error}") from error
