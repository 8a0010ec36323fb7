"""GPTModel with absorbed or standard MLA, wrapped in Megatron's data parallelism."""

from __future__ import annotations

import argparse
import dataclasses

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import Float16Module, param_is_not_shared
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.deepseek_router import use_deepseek_router
from absorbed_mla.dsa.warm_up import train_only_indexer
from absorbed_mla.options import ROUTER_OPTIONS
from absorbed_mla.packed_router import use_packed_router
from absorbed_mla.standard_mla import get_standard_mla_decoder_block_spec
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from training.fp8 import fp8_fields
from training.model_options import is_padded, token_dispatcher, transformer_impl
from training.presets import ModelPreset

# Fields of a preset that are no fields of Megatron's config.
_NOT_IN_CONFIG = {
    *("vocab_size", "max_position_embeddings", "latent_norm_eps", "moe_layer_freq"),
    *ROUTER_OPTIONS,
}
# Begin the names of fields of sparse attention.
_SPARSE = ("dsa_", "experimental_attention_variant")

# Kernels that need apex or a CUDA extension, and fused RoPE, which MLA refuses.
_NOT_FUSED = {
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "apply_rope_fusion": False,
}


def params_dtype(args: argparse.Namespace) -> torch.dtype:
    """The dtype of the parameters that ``--bf16`` or ``--fp16`` choose; fp32 without them."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def build_config(
    args: argparse.Namespace, model: ModelPreset, device: torch.device, **fields: object
) -> MLATransformerConfig:
    """Megatron's config of the model.

    Args:
        args: The command line.
        model: Sizes of the model.
        device: Device of the model.
        fields: More fields of the config.

    Raises:
        ValueError: If Megatron refuses the combination of options.
    """
    dtype = params_dtype(args)
    names = {f.name for f in dataclasses.fields(model)} - _NOT_IN_CONFIG
    if not model.num_moe_experts:
        names = {name for name in names if "moe" not in name}
    if model.experimental_attention_variant is None:
        names = {name for name in names if not name.startswith(_SPARSE)}
    options = {name: getattr(model, name) for name in sorted(names)}
    # Padded packs differ in length, so pipeline stages must send each other the lengths.
    lengths_vary = is_padded(args) and args.pipeline_model_parallel_size > 1
    if model.num_moe_experts:
        options |= _moe_options(args, model, device)
    elif lengths_vary:
        # Megatron refuses its default dispatcher with varying lengths even without experts.
        options["moe_token_dispatcher_type"] = "alltoall"
    try:
        return MLATransformerConfig(
            **options,
            **_NOT_FUSED,
            normalization="RMSNorm",
            qk_layernorm=True,
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=F.silu,
            init_method_std=args.init_method_std,
            attention_dropout=args.attention_dropout,
            hidden_dropout=args.hidden_dropout,
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            cp_comm_type=_cp_comm_type(args, model),
            variable_seq_lengths=lengths_vary,
            sequence_parallel=args.sequence_parallel,
            recompute_granularity=args.recompute_granularity,
            recompute_modules=args.recompute_modules,
            recompute_method=args.recompute_method,
            recompute_num_layers=args.recompute_num_layers,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=args.bf16,
            fp16=args.fp16,
            transformer_impl=transformer_impl(args, device.type),
            use_cpu_initialization=device.type == "cpu",
            calculate_per_token_loss=True,
            **fp8_fields(args),
            **fields,
        )
    except AssertionError as error:
        raise ValueError(f"Megatron refuses these options: {error}") from error


def _cp_comm_type(args: argparse.Namespace, model: ModelPreset) -> str | list[str]:
    """One for all layers, or a list."""
    types = args.cp_comm_type
    if model.experimental_attention_variant is not None:
        # What "auto" takes with sparse attention. Megatron's config accepts no other name.
        types = ["all_gather" if name == "auto" else name for name in types]
    return types[0] if len(types) == 1 else types


def _moe_options(args: argparse.Namespace, model: ModelPreset, device: torch.device) -> dict:
    return {
        "moe_layer_freq": list(model.moe_layer_freq),
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": token_dispatcher(args, device.type),
        "moe_grouped_gemm": args.moe_grouped_gemm,
    }


def build_model(
    args: argparse.Namespace,
    config: MLATransformerConfig,
    model: ModelPreset,
    device: torch.device,
) -> DistributedDataParallel:
    """This rank's part of the model, wrapped in Megatron's data parallelism."""
    if args.attention == "standard":
        if config.experimental_attention_variant is not None:
            raise ValueError(
                "--attention must be absorbed for a model with sparse attention, got standard: "
                "Megatron's MLASelfAttention is dense"
            )
        block = get_standard_mla_decoder_block_spec(config, backend=config.transformer_impl)
        block = use_deepseek_router(block, _model_options(model, AbsorbedMLAOptions()))
    else:
        options = AbsorbedMLAOptions(form=args.form, down_projection=args.down_projection)
        block = _absorbed_block(config, model, options)
    if is_padded(args):
        use_packed_router(block)
    gpt = _gpt(config, block, model).to(device)
    if args.train_only:
        train_only_indexer(gpt)
    module = Float16Module(config, gpt) if args.bf16 or args.fp16 else gpt
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=args.overlap_grad_reduce
    )
    wrapped = DistributedDataParallel(config, ddp_config, module)
    config.no_sync_func = wrapped.no_sync
    if args.overlap_grad_reduce:
        config.grad_sync_func = wrapped.start_grad_sync
    return wrapped


def absorbed_gpt(
    config: MLATransformerConfig,
    model: ModelPreset,
    options: AbsorbedMLAOptions,
    device: torch.device,
) -> GPTModel:
    """A whole GPT with absorbed MLA and random weights, to generate with.

    It is not split into pipeline stages. ``config`` is changed: it says that latents are cached.
    """
    config.cache_mla_latents = True
    return _gpt(config, _absorbed_block(config, model, options), model).to(device)


def _absorbed_block(
    config: MLATransformerConfig, model: ModelPreset, options: AbsorbedMLAOptions
) -> TransformerBlockSubmodules:
    options = _model_options(model, options)
    backend = config.transformer_impl
    return get_absorbed_mla_decoder_block_spec(config, backend=backend, options=options)


def _model_options(model: ModelPreset, options: AbsorbedMLAOptions) -> AbsorbedMLAOptions:
    """Options with those that belong to the model."""
    own = {name: getattr(model, name) for name in ROUTER_OPTIONS}
    return options.replace(latent_norm_eps=model.latent_norm_eps, **own)


def _gpt(
    config: MLATransformerConfig, block: TransformerBlockSubmodules, model: ModelPreset
) -> GPTModel:
    return GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        # MLA has its own rotary embedding; "rope" keeps Megatron from adding a learned one.
        position_embedding_type="rope",
    )


def unwrap(model: torch.nn.Module) -> GPTModel:
    """The GPTModel inside data-parallel and precision wrappers."""
    while not isinstance(model, GPTModel):
        model = model.module
    return model


def count_parameters(model: torch.nn.Module, *, trained: bool = False) -> int:
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
