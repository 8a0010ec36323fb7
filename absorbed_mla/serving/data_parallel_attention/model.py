"""Megatron's GPTModel with data-parallel attention: layer spec, embedding and output layer.

    exchange = TokenExchange(parallel_state.get_expert_tensor_and_model_parallel_group())
    spec = shard_layers(get_absorbed_mla_decoder_block_spec(config), exchange)
    model = shard_vocabulary(GPTModel(config, spec, ...), exchange)

Megatron's tensor-parallel size is 1: to its engine, every rank is a replica. Its expert groups
(``expert_model_parallel_size`` x ``expert_tensor_parallel_size``) say which ranks divide weights,
also where a model has no experts.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from absorbed_mla.moe_layer import NormedMoE
from absorbed_mla.serving.data_parallel_attention.exchange import TokenExchange
from absorbed_mla.serving.data_parallel_attention.mlp import ShardedMLP, ShardedMoE
from absorbed_mla.serving.data_parallel_attention.vocabulary import ShardedEmbedding, ShardedOutput


def shard_layers(
    block: TransformerBlockSubmodules, exchange: TokenExchange
) -> TransformerBlockSubmodules:
    """The spec of a decoder block, with MLPs and experts divided over ranks.

    Args:
        block: Of ``specs.absorbed_mla_layer_specs``.

    Raises:
        ValueError: If a layer has another MLP than Megatron's own, or Megatron's groups do not fit.
    """
    _require_groups(exchange)
    layers = []
    for layer in block.layer_specs:
        mlp = _divided(layer.submodules.mlp, exchange)
        layers.append(replace(layer, submodules=replace(layer.submodules, mlp=mlp)))
    block = copy.copy(block)
    block.layer_specs = layers
    return block


def _divided(mlp: Any, exchange: TokenExchange) -> functools.partial:
    """What builds the divided MLP of a layer, from what builds Megatron's."""
    made = getattr(mlp, "func", None)
    if made == MLP.as_mlp_submodule:
        return functools.partial(ShardedMLP.build, exchange, **mlp.keywords)
    if made in (MoELayer, NormedMoE):
        return functools.partial(ShardedMoE, exchange=exchange, **mlp.keywords)
    raise ValueError(
        f"data-parallel attention needs layers with Megatron's MLP or MoELayer, got {mlp}"
    )


def shard_vocabulary(model: GPTModel, exchange: TokenExchange) -> GPTModel:
    """Put a divided embedding and output layer into a model that was just built.

    Args:
        model: Its layers are divided, its weights not set yet.

    Raises:
        ValueError: If the vocabulary cannot be divided, or the model has MTP layers.
    """
    config, vocabulary = model.config, model.vocab_size
    if config.mtp_num_layers:
        raise ValueError(
            f"mtp_num_layers must be 0 with data-parallel attention, got {config.mtp_num_layers}"
        )
    if vocabulary % exchange.size:
        raise ValueError(
            f"vocab_size must be a multiple of the {exchange.size} ranks that divide it, got "
            f"{vocabulary}"
        )
    model.embedding.word_embeddings = ShardedEmbedding(
        vocabulary,
        config.hidden_size,
        init_method=config.embedding_init_method,
        config=config,
        exchange=exchange,
    )
    model.output_layer = ShardedOutput(
        config.hidden_size,
        vocabulary,
        config=config,
        init_method=config.init_method,
        bias=False,
        skip_weight_param_allocation=model.share_embeddings_and_output_weights,
        exchange=exchange,
    )
    return model


def exchange_of(model: GPTModel) -> TokenExchange | None:
    """With the ranks that a model's weights are divided over; None without such."""
    return getattr(model.output_layer, "exchange", None) if model.post_process else None


def _require_groups(exchange: TokenExchange) -> None:
    sizes: Sequence[tuple[str, int]] = (
        ("tensor_model_parallel_size", parallel_state.get_tensor_model_parallel_world_size()),
        ("pipeline_model_parallel_size", parallel_state.get_pipeline_model_parallel_world_size()),
        ("context_parallel_size", parallel_state.get_context_parallel_world_size()),
    )
    for name, size in sizes:
        if size != 1:
            raise ValueError(f"{name} must be 1 with data-parallel attention, got {size}")
    experts = parallel_state.get_expert_tensor_and_model_parallel_group()
    if experts.size() != exchange.size or exchange.size < 2:
        raise ValueError(
            "expert_model_parallel_size x expert_tensor_parallel_size must be the number of ranks "
            f"of data-parallel attention, at least 2, also without experts; got {experts.size()} "
            f"and {exchange.size}"
        )
