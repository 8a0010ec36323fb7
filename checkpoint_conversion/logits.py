"""Logits of a checkpoint, by transformers or by Megatron, depending on the format.

Both libraries, and this package's model, are imported inside functions; the rest of the converter
works without them. Weights are read by the converter's own readers, because Megatron's loader
unpickles whatever a checkpoint holds.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_conversion.errors import CheckpointError, raise_problems
from checkpoint_conversion.expert_stacks import stacked
from checkpoint_conversion.formats.base import Checkpoint
from checkpoint_conversion.layouts import MegatronLayout, laid_out_tensors
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession
from checkpoint_conversion.mapping import to_megatron, without_mtp_layers
from checkpoint_conversion.megatron_args import config_fields, layer_options, to_megatron_args
from checkpoint_conversion.model import ModelConfig

# Format of a checkpoint -> the attention that evaluates it.
ATTENTION = {"megatron": "standard", "megatron-legacy": "standard", "absorbed": "absorbed"}


def checkpoint_logits(checkpoint: Checkpoint, tokens: Tensor) -> Tensor:
    """Logits of a checkpoint's model, without its multi-token-prediction layers.

    Args:
        checkpoint: Hugging Face's are evaluated by transformers, Megatron's by a GPTModel.
        tokens: Token ids [B, S].

    Returns:
        [B, S, vocabulary], float32.

    Raises:
        CheckpointError: If the library has no place for a tensor, or misses one.
    """
    config, tensors = without_mtp(checkpoint.config, checkpoint.hugging_face_tensors())
    if checkpoint.format == "hf":
        return transformers_logits(transformers_model(config, tensors), tokens)
    with one_process():
        model = megatron_model(config, ATTENTION[checkpoint.format])
        load_megatron_model(model, config, tensors)
        return megatron_logits(model, tokens)[..., : config.vocab_size]


def library(checkpoint: Checkpoint) -> str:
    """Name and version of the library that :func:`checkpoint_logits` uses for a checkpoint."""
    if checkpoint.format == "hf":
        return f"transformers {version('transformers')}"
    return f"megatron-core {version('megatron-core')}, {ATTENTION[checkpoint.format]} MLA"


def without_mtp(
    config: ModelConfig, tensors: Mapping[str, LazyTensor]
) -> tuple[ModelConfig, dict[str, LazyTensor]]:
    """The same model without its multi-token-prediction layers."""
    return dataclasses.replace(config, mtp_layers=0), without_mtp_layers(tensors, config)


def transformers_model(config: ModelConfig, tensors: Mapping[str, LazyTensor]) -> Any:
    """The model of transformers with these weights, in float32; Kimi-K2 is a DeepSeek-V3.

    Raises:
        CheckpointError: If transformers has no place for a tensor, or misses one.
    """
    import transformers

    # Classes chosen by name, so that no code of the checkpoint runs. FP8 is dequantised already.
    fields = dict(config.without_quantisation().hugging_face)
    del fields["model_type"]
    model_class = f"{config.model.transformers_class}ForCausalLM"
    config_class = getattr(transformers, config.model.transformers_config)
    tensors = stacked(tensors, config)
    with ReadSession() as session:
        model, report = getattr(transformers, model_class).from_pretrained(
            None,
            config=config_class.from_dict(fields),
            state_dict={name: tensor.load(session) for name, tensor in tensors.items()},
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
    problems = [f"{what}: {name}" for what, names in report.items() for name in sorted(names)]
    raise_problems("transformers does not load these weights as they are:", problems)
    return model.eval()


@torch.no_grad()
def transformers_logits(model: Any, tokens: Tensor) -> Tensor:
    """Logits [B, S, vocabulary] of a model of transformers."""
    return model(tokens, use_cache=False).logits.float()


def megatron_model(config: ModelConfig, attention: str, *, tensor_parallel: int = 1) -> Any:
    """A GPTModel in float32 on the CPU, its weights not yet set.

    Args:
        config: With its config.json.
        attention: ``"standard"`` (Megatron's own MLA) or ``"absorbed"``.
        tensor_parallel: Ranks of the tensor-parallel group that the process is in.
    """
    from megatron.core.models.gpt import GPTModel

    args = to_megatron_args(config, tensor_parallel=tensor_parallel, dtype=torch.float32)
    # Megatron asks for a norm in front of a query that is projected directly, too; Hugging Face's
    # models have none there.
    without_norms = attention == "standard" and config.q_lora_rank is None
    megatron_config = _megatron_config(args, qk_layernorm=not without_norms)
    model = GPTModel(
        megatron_config,
        transformer_layer_spec=_block_spec(megatron_config, attention, args),
        vocab_size=config.vocab_size,
        max_sequence_length=args.max_position_embeddings,
        # MLA makes its own rotary embedding; "rope" only says that there is no learned table.
        position_embedding_type="rope",
        share_embeddings_and_output_weights=config.tied_embeddings,
    )
    if without_norms:
        _add_kv_norms(model, megatron_config)
    if attention == "standard" and args.rope_factors is not None:
        for layer in model.decoder.layers:
            layer.self_attention.rotary_pos_emb.inv_freq /= torch.tensor(args.rope_factors)
    return model.eval()


@torch.no_grad()
def load_megatron_model(model: Any, config: ModelConfig, tensors: Mapping[str, LazyTensor]) -> None:
    """Set the weights of a model without parallelism, given under Hugging Face's names.

    Raises:
        CheckpointError: If the tensors do not fit the config.
    """
    own = {k: v for k, v in model.state_dict().items() if not k.endswith("_extra_state")}
    layout = MegatronLayout.recognise(own)
    weights = laid_out_tensors(to_megatron(tensors, config), layout, config)
    assert weights.keys() == own.keys(), weights.keys() ^ own.keys()
    for name, tensor in weights.items():
        with ReadSession() as session:
            own[name].copy_(tensor.load(session))


@torch.no_grad()
def megatron_logits(model: Any, tokens: Tensor) -> Tensor:
    """Logits [B, S, vocabulary] of a GPTModel, gathered from all tensor-parallel ranks."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return gather_from_tensor_model_parallel_region(model(tokens, positions, None)).float()


@contextmanager
def one_process() -> Iterator[None]:
    """Set up Megatron's process groups for one process on the CPU, unless they exist already."""
    from absorbed_mla.cpu_host import enable_cpu_host

    enable_cpu_host()
    from megatron.core import parallel_state, tensor_parallel

    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _megatron_config(args: Namespace, qk_layernorm: bool) -> Any:
    """Megatron's config from the arguments that the converter writes into Megatron checkpoints."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    options = config_fields(args, MLATransformerConfig) | {
        "qk_layernorm": qk_layernorm,
        "moe_token_dispatcher_type": "allgather",
        "transformer_impl": "local",
        "use_cpu_initialization": True,
    }
    if options.get("experimental_attention_variant") == "dsa":
        # Products of index queries and keys are the same without it, and Megatron's wants a GPU.
        options["dsa_indexer_rotate_activation"] = False
    return MLATransformerConfig(**options)


def _block_spec(megatron_config: Any, attention: str, args: Namespace) -> Any:
    """Layers with either attention, and what Megatron's MoE layers lack where the model has it."""
    from absorbed_mla import AbsorbedMLAOptions
    from absorbed_mla.moe_layer import use_moe_options

    options = AbsorbedMLAOptions(**layer_options(args))
    if attention == "standard":
        from absorbed_mla.standard_dsa import get_standard_dsa_decoder_block_spec
        from absorbed_mla.standard_mla import get_standard_mla_decoder_block_spec

        if megatron_config.experimental_attention_variant == "dsa":
            block = get_standard_dsa_decoder_block_spec(megatron_config)
        else:
            block = get_standard_mla_decoder_block_spec(megatron_config, backend="local")
        return use_moe_options(block, options)
    from absorbed_mla.own_packages import require_own_packages

    try:
        require_own_packages("specs")
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec

    return get_absorbed_mla_decoder_block_spec(megatron_config, backend="local", options=options)


def _add_kv_norms(model: Any, megatron_config: Any) -> None:
    """Add the K/V norm to every attention: Megatron builds it only together with a query norm."""
    from absorbed_mla.norm import RMSNorm

    for layer in model.decoder.layers:
        layer.self_attention.kv_layernorm = RMSNorm(
            megatron_config, megatron_config.kv_lora_rank, eps=megatron_config.layernorm_epsilon
        )
