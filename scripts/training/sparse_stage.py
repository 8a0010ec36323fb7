"""A stage of training with sparse attention: what is attended to, what changes, what is learned."""

from __future__ import annotations

import argparse

from megatron.core import parallel_state
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossLoggingHelper,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig

from absorbed_mla.dsa.config import DSAConfig
from training.presets import ModelPreset


def stage_model(args: argparse.Namespace, model: ModelPreset) -> ModelPreset:
    """The model as this stage computes it: while an indexer warms up, no query has a choice."""
    if not args.train_only:
        return model
    assert model.dsa_indexer_topk is not None
    return model.replace(dsa_indexer_topk=max(model.dsa_indexer_topk, args.seq_length))


def stage_fields(args: argparse.Namespace, model: ModelPreset) -> dict[str, object]:
    """Fields of Megatron's config for the loss of an indexer; none for a dense model."""
    if model.experimental_attention_variant is None:
        return {}
    return {
        "dsa_indexer_loss_coeff": args.dsa_indexer_loss_coeff,
        "dsa_indexer_use_sparse_loss": args.dsa_indexer_use_sparse_loss,
    }


def mean_indexer_loss(config: MLATransformerConfig, tokens: int) -> float | None:
    """Megatron's ``indexer loss`` since the last call; collective over all ranks.

    Args:
        config: Of the model, with ``calculate_per_token_loss``.
        tokens: Of all ranks since the last call.

    Returns:
        The coefficient times the KL divergence: the mean over tokens and layers that have an
        indexer. None if no indexer learns.
    """
    if config.experimental_attention_variant != "dsa" or not config.dsa_indexer_loss_coeff:
        return None
    found: dict[str, float] = {}
    # Megatron averages over data-parallel ranks, and divides by the number of all layers.
    DSAIndexerLossLoggingHelper.track_indexer_metrics(
        parallel_state.get_data_parallel_world_size() / max(tokens, 1),
        iteration=0,
        writer=None,
        total_loss_dict=found,
    )
    dsa, layers = DSAConfig.from_config(config), config.num_layers
    learning = sum(not dsa.shares_selection(number + 1) for number in range(layers))
    return float(found["indexer loss"]) * layers / learning
