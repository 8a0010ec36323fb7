"""The two models: the same weights where they have the same names, attention apart."""

from __future__ import annotations

import argparse
import zlib

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import nn

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.generation.cuda_graphs import graph_fields, seed_generators
from absorbed_mla.testing.standard_mla import get_standard_mla_decoder_block_spec
from engine_benchmark.arguments import Case
from engine_benchmark.machine import Machine
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec


def build(case: Case, args: argparse.Namespace, machine: Machine) -> GPTModel:
    """A model with random weights, in evaluation mode.

    Raises:
        ValueError: If it cannot be built here.
    """
    config = model_config(case, args, machine)
    seed_generators(args.seed, graphs=case.graphs)
    model = GPTModel(
        config,
        transformer_layer_spec=_spec(case, config, args),
        vocab_size=args.vocab_size,
        max_sequence_length=args.longest_prompt + args.longest_output,
        position_embedding_type="rope",
    )
    model.to(machine.device, machine.dtype)
    _fill(model, args.seed)
    return model.eval()


@torch.no_grad()
def _fill(model: nn.Module, seed: int) -> None:
    """Weights that keep activations near unit size, whichever tracker Megatron would draw from.

    Next to a layer's output an embedding is then small, so that the whole context decides.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            generator = torch.Generator(parameter.device)
            generator.manual_seed(seed + zlib.crc32(name.encode()))
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)


def model_config(case: Case, args: argparse.Namespace, machine: Machine) -> MLATransformerConfig:
    """Megatron's config; CUDA graphs in it only on a GPU."""
    graphs = case.graphs and machine.on_gpu
    return MLATransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.heads,
        q_lora_rank=args.q_lora_rank,
        kv_lora_rank=args.kv_lora_rank,
        qk_head_dim=args.qk_head_dim,
        qk_pos_emb_head_dim=args.qk_pos_emb_head_dim,
        v_head_dim=args.v_head_dim,
        qk_layernorm=True,
        rope_type="rope",
        rotary_base=10000,
        rotary_scaling_factor=1.0,
        mscale_all_dim=0.0,
        cache_mla_latents=True,
        **graph_fields(args.cuda_graph_scope if graphs else None),
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=machine.dtype,
        bf16=machine.dtype == torch.bfloat16,
        transformer_impl="transformer_engine" if HAVE_TE and machine.on_gpu else "local",
        use_cpu_initialization=not machine.on_gpu,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )


def _spec(case: Case, config: MLATransformerConfig, args: argparse.Namespace):
    if case.implementation == "standard":
        return get_standard_mla_decoder_block_spec(config, backend=config.transformer_impl)
    options = AbsorbedMLAOptions(
        form=args.form,
        paged_attention_backend=args.paged_attention_backend,
        batch_invariant=args.batch_invariant,
    )
    return get_absorbed_mla_decoder_block_spec(
        config, backend=config.transformer_impl, options=options
    )
