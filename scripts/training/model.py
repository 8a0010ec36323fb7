"""GPTModel with absorbed or standard MLA, built by Megatron's builder from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import nn

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.checkpoint.distributed import load_model_weights
from absorbed_mla.dsa.warm_up import INDEXER, train_only_indexer
from absorbed_mla.lora import add_lora, load_peft_adapter
from absorbed_mla.moe_layer import use_moe_options
from absorbed_mla.packed_router import use_packed_router
from absorbed_mla.standard_mla import get_standard_mla_decoder_block_spec
from checkpoint_conversion.megatron_args import layer_options
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from training.megatron_loop import gpt_config_from_args
from training.options import lora_config
from training.rules import is_padded


def model_config(
    args: argparse.Namespace, options: AbsorbedMLAOptions | None = None, **fields: object
):
    """Megatron's ``GPTModelConfig`` of a checked command line; its ``transformer`` is the layers'.

    Args:
        args: The command line, with the vocabulary set.
        options: Of the layers; None takes those of the command line.
        fields: More fields of the layers' config.

    Raises:
        ValueError: If Megatron refuses the combination of options.
    """
    stage = argparse.Namespace(**{**vars(args), **fields})
    if args.train_only:
        # While an indexer warms up, no query has a choice.
        stage.dsa_indexer_topk = max(args.dsa_indexer_topk, args.seq_length)
    try:
        config = gpt_config_from_args(stage)
    except AssertionError as error:
        raise ValueError(f"Megatron refuses these options: {error}") from error
    if options is None:
        ours = {"form": args.form, "down_projection": args.down_projection}
        options = AbsorbedMLAOptions(**ours if args.attention == "absorbed" else {})
    options = options.replace(**layer_options(args))
    config.transformer_layer_spec = partial(_decoder_block, args, options)
    if args.attention == "absorbed":
        config.builder = "specs.absorbed_mla_gpt_builder.AbsorbedMLAGPTModelBuilder"
    return config


def training_config(
    args: argparse.Namespace,
    weights: str | None,
    options: AbsorbedMLAOptions | None = None,
    **fields: object,
):
    """:func:`model_config` of a model that is trained, from ``weights`` or random ones.

    Args:
        weights: Folder of a distributed checkpoint.
    """
    config = model_config(args, options, **fields)
    if args.train_only:
        config.pre_wrap_hooks.append(_freeze)
    if weights is not None:
        initial = (INDEXER,) if args.new_indexer else ()
        config.pre_wrap_hooks.append(partial(_begin_with, weights, initial))
    if args.lora_adapter:
        config.pre_wrap_hooks.append(_with(load_peft_adapter, args.lora_adapter))
    elif args.lora_rank is not None:
        config.pre_wrap_hooks.append(_with(add_lora, lora_config(args)))
    return config


def build_gpt(config, device: torch.device) -> GPTModel:
    """A whole GPT with random weights, not wrapped for training, to generate or measure with.

    Args:
        config: Of :func:`model_config`.
        device: Of the model.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups()
    builder = config.get_builder_cls()(config)
    return builder.build_model(groups, pre_process=True, post_process=True).to(device)


def _decoder_block(
    args: argparse.Namespace, options: AbsorbedMLAOptions, config: object, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The spec that Megatron's builder asks for, of one pipeline stage."""
    transformer: MLATransformerConfig = config.transformer
    backend = transformer.transformer_impl
    if args.attention == "standard":
        block = get_standard_mla_decoder_block_spec(transformer, backend=backend)
        block = use_moe_options(block, options)
    else:
        block = get_absorbed_mla_decoder_block_spec(
            transformer, backend=backend, options=options, vp_stage=vp_stage
        )
    if is_padded(args) or getattr(args, "shared_prefixes", False):
        use_packed_router(block)
    return block


def _freeze(stages: list[nn.Module]) -> list[nn.Module]:
    for stage in stages:
        train_only_indexer(stage)
    return stages


def _with(add, lora) -> Callable[[list[nn.Module]], list[nn.Module]]:
    def hook(stages: list[nn.Module]) -> list[nn.Module]:
        add(stages, lora)
        return stages

    return hook


def _begin_with(weights: str, initial: tuple[str, ...], stages: list[nn.Module]) -> list[nn.Module]:
    if len(stages) > 1:
        raise ValueError(
            "--load takes weights into one model chunk on each rank, without a virtual pipeline"
        )
    load_model_weights(stages[0], weights, initial=initial)
    return stages


def count_parameters(model: nn.Module, *, trained: bool = False) -> int:
    """Parameters of the whole model, over all tensor-, expert- and pipeline-parallel ranks.

    Args:
        model: This rank's part of it.
        trained: Count only those that are not frozen.
    """
    device = next(model.parameters()).device
    dense, experts = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
    expert_tp = parallel_state.get_expert_tensor_parallel_group()
    for param in model.parameters():
        if trained and not param.requires_grad:
            continue
        # A parameter with copies on several ranks is counted once.
        if param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(
            param, expert_tp_group=expert_tp
        ):
            # Megatron's mark of experts, which have parallel groups of their own.
            total = dense if getattr(param, "allreduce", True) else experts
            total += param.numel()
    dist.all_reduce(dense, group=parallel_state.get_model_parallel_group())
    dist.all_reduce(experts, group=parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    return int(dense + experts)
