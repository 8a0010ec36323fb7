"""The model of a checkpoint in any format, converted in memory while it is read.

Every rank reads its share of each tensor, one tensor after the other, with the readers of the
converter, which run no code of a checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig

from absorbed_mla.log_once import log_once
from absorbed_mla.lora.slots import LoRASlots
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.serving.data_parallel_attention.exchange import TokenExchange
from absorbed_mla.serving.data_parallel_attention.model import shard_layers, shard_vocabulary
from absorbed_mla.serving.engine_options import padded_step_tokens
from absorbed_mla.serving.experts.layer import SEVERAL_RANKS, group_experts
from absorbed_mla.serving.experts.product import why_not_grouped
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.scheduler.cuda_graphs import model_fields, seed_generators
from absorbed_mla.serving.weights.fused_residuals import fuse_residuals
from absorbed_mla.serving.weights.fused_swiglu import fuse_swiglu
from absorbed_mla.serving.weights.index_weights import keep_head_weights
from absorbed_mla.serving.weights.live_weights import set_weights
from checkpoint_conversion.formats.base import Checkpoint
from checkpoint_conversion.mapping import without_mtp_layers
from checkpoint_conversion.megatron_args import (
    config_fields,
    layer_options,
    model_notes,
    to_megatron_args,
)
from checkpoint_conversion.model import DTYPES, ModelConfig
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from specs.absorbed_mla_mtp_specs import get_absorbed_mla_mtp_block_spec

_logger = logging.getLogger(__name__)


def model_dtype(options: LLMOptions, checkpoint: Checkpoint) -> torch.dtype:
    """Dtype of weights and computation; FP8 checkpoints are dequantised to bfloat16."""
    if options.dtype != "auto":
        return DTYPES[options.dtype]
    return checkpoint.config.dtype or torch.bfloat16


def load_model(checkpoint: Checkpoint, options: LLMOptions, device: torch.device) -> GPTModel:
    """This rank's share of the model, in evaluation mode; collective.

    Megatron's tensor-parallel groups must exist.

    Raises:
        ValueError: If Megatron refuses the options.
        CheckpointError: If the tensors do not fit the model.
    """
    config, tensors = checkpoint.config, checkpoint.hugging_face_tensors()
    if not options.num_speculative_tokens:
        tensors = without_mtp_layers(tensors, config)
        config = dataclasses.replace(config, mtp_layers=0)
    for note in model_notes(config):
        _logger.warning(note)
    dtype = model_dtype(options, checkpoint)
    args = to_megatron_args(config, dtype=dtype)
    grouped = _groups_experts(config, options, device, dtype)
    if options.parity and config.num_experts and not grouped and device.type == "cuda":
        # Megatron adds up the experts' results in a fixed order only then.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        megatron_config = _megatron_config(args, config, options, device, grouped)
    except AssertionError as error:
        raise ValueError(f"Megatron refuses these options: {error}") from error
    seed_generators(options.seed, graphs=options.cuda_graphs)
    model = _build(megatron_config, args, config, options, grouped).to(device)
    if dtype != torch.float32:
        # Rounds the parameters, except those that Megatron keeps in fp32.
        model = Float16Module(megatron_config, model).module
        keep_head_weights(model, config, tensors, dtype, parity=options.parity)
    set_weights(model, config, tensors)
    if options.enable_lora:
        sizes = options.step_tokens, options.max_num_seqs, options.tensor_parallel_size
        graph_tokens = padded_step_tokens(*sizes) if options.cuda_graphs else None
        LoRASlots(model, options.max_loras, options.max_lora_rank, graph_tokens)
    return model.eval()


def _groups_experts(
    config: ModelConfig, options: LLMOptions, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether the model's experts are computed together; logs what ``"auto"`` took.

    Raises:
        ValueError: If they must be and cannot.
    """
    why_not = _why_not_grouped(config, options, device, dtype)
    if options.experts != "auto":
        if options.experts == "grouped" and why_not:
            raise ValueError(f"experts must be 'sequential' or 'auto', got 'grouped': {why_not}")
        return options.experts == "grouped"
    if not config.num_experts:
        return False
    how = "one after the other" if why_not else "grouped"
    log_once(_logger, f"experts are computed {how}", why_not or "")
    return why_not is None


def _why_not_grouped(
    config: ModelConfig, options: LLMOptions, device: torch.device, dtype: torch.dtype
) -> str | None:
    if not config.num_experts:
        return "the model has no experts"
    if options.parity and parallel_state.get_expert_tensor_and_model_parallel_group().size() > 1:
        return f"in parity mode {SEVERAL_RANKS}"
    parts = parallel_state.get_expert_tensor_parallel_world_size()
    widths = {
        "hidden_size": config.hidden_size,
        "a rank's channels of an expert": config.moe_ffn_hidden_size // parts,
    }
    mode = {name: getattr(options, name) for name in ("parity", "tensor_parallel_parts")}
    return why_not_grouped(device, dtype, widths, **mode)


def _megatron_config(
    args: argparse.Namespace,
    config: ModelConfig,
    options: LLMOptions,
    device: torch.device,
    grouped: bool,
) -> MLATransformerConfig:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    on_gpu, parts = device.type == "cuda", options.tensor_parallel_parts
    drafts = options.num_speculative_tokens
    fields = config_fields(args, MLATransformerConfig) | {
        "pipeline_dtype": args.params_dtype,
        **_parallel_fields(config),
        "moe_token_dispatcher_type": "alltoall" if on_gpu or parts else "allgather",
        "transformer_impl": "transformer_engine" if on_gpu and HAVE_TE and not parts else "local",
        # One MTP layer may draft several tokens, one after the other.
        "mtp_use_repeated_layer": drafts > config.mtp_layers == 1,
        "cache_mla_latents": True,
        "use_cpu_initialization": not on_gpu,
    }
    if config.q_lora_rank and not config.indexer and not options.parity:
        # Query and keys are projected down by one product, which a step of few tokens waits for.
        # Training, with which parity mode agrees to the bit, may have two; sparse attention has.
        fields["mla_down_proj_fusion"] = True
    if options.cuda_graphs:
        # Megatron insists on padding where ranks have their own experts; grouped ones ignore it.
        padded = not grouped or options.expert_parallel_size > 1
        fields |= model_fields(bool(args.num_experts) and padded)
    return MLATransformerConfig(**fields)


def _parallel_fields(config: ModelConfig) -> dict[str, object]:
    """Fields of Megatron's config that say how ranks share the model."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    ep = parallel_state.get_expert_model_parallel_world_size()
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": stages,
        "pipeline_model_parallel_layout": _stages(config, stages) if stages > 1 else None,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        # So that one rank sends a token to its experts.
        "sequence_parallel": tp > 1 and ep > 1,
    }


def _stages(config: ModelConfig, count: int) -> list[list[str]]:
    """Megatron's layout of the pipeline: as many layers in each stage, or one more in the first."""
    few, more = divmod(config.num_layers, count)
    stages = [["decoder"] * (few + (stage < more)) for stage in range(count)]
    stages[0].insert(0, "embedding")
    stages[-1] += [*["mtp"] * config.mtp_layers, "loss"]
    return stages


def _build(
    megatron_config: MLATransformerConfig,
    args: argparse.Namespace,
    config: ModelConfig,
    options: LLMOptions,
    grouped: bool,
) -> GPTModel:
    attention = AbsorbedMLAOptions(
        # Tokens of several adapters are together in a step, which one form computes.
        form="absorbed" if options.enable_lora else options.form,
        latent_cache_dtype=options.latent_cache_dtype,
        batch_invariant=options.parity,
        **layer_options(args),
    )
    impl = megatron_config.transformer_impl
    spec = get_absorbed_mla_decoder_block_spec(megatron_config, backend=impl, options=attention)
    drafting = None
    if config.mtp_layers:
        drafting = get_absorbed_mla_mtp_block_spec(megatron_config, backend=impl, options=attention)
    exchange = None
    # Ranks that divide the vocabulary.
    parts = options.tensor_parallel_parts or megatron_config.tensor_model_parallel_size
    if options.data_parallel_attention:
        exchange = TokenExchange(parallel_state.get_expert_tensor_and_model_parallel_group())
        spec, parts = shard_layers(spec, exchange), exchange.size
    if grouped:
        spec = group_experts(spec, parity=options.parity)
        drafting = drafting and group_experts(drafting, parity=options.parity)
    model = GPTModel(
        megatron_config,
        transformer_layer_spec=spec,
        mtp_block_spec=drafting,
        vocab_size=-(-config.vocab_size // parts) * parts,
        max_sequence_length=args.max_position_embeddings,
        # MLA has its own rotary embedding; "rope" only says that there is no learned table.
        position_embedding_type="rope",
        share_embeddings_and_output_weights=config.tied_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    fuse_swiglu(model, rounds_each_step=options.parity)
    fuse_residuals(model)
    return model if exchange is None else shard_vocabulary(model, exchange)
