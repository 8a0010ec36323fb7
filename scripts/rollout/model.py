"""The model of a rollout: trained by Megatron's DDP, and ready to generate."""

from __future__ import annotations

import argparse

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.batch_invariant import enable_batch_invariant_mode
from training.absorbed_model import absorbed_gpt, load_weights
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
    options = AbsorbedMLAOptions(
        form=args.form,
        down_projection=args.down_projection,
        batch_invariant=args.batch_invariant,
    )
    gpt = absorbed_gpt(config, preset, options, device)
    if args.load:
        load_weights(gpt, args.load)
    module = Float16Module(config, gpt) if args.bf16 else gpt
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module
    )
    config.no_sync_func = model.no_sync
    return model
