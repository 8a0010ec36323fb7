"""The keys that sparse attention chose for the tokens of an engine's requests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.models.gpt import GPTModel
from torch import nn

from absorbed_mla.dsa.core_attention import SparseCoreAttention
from absorbed_mla.dsa.index_sharing import Selected
from absorbed_mla.dsa.selection import first_keys
from absorbed_mla.serving.token_records import Record, TokenRecords


def records_of(model: GPTModel, context: DynamicInferenceContext) -> TokenRecords:
    """Records of the keys of all layers with an indexer: positions in the request, int32.

    Args:
        model: Of this rank.
        context: Of its engine.

    Raises:
        ValueError: If the model has no sparse attention.
    """
    config = model.config
    if config.experimental_attention_variant != "dsa":
        raise ValueError(
            "enable_return_indexer_topk needs a model with sparse attention "
            f"(experimental_attention_variant='dsa'), got {config.experimental_attention_variant!r}"
        )

    def follow(layer: nn.Module, record: Record) -> Callable[[], None]:
        assert isinstance(layer, SparseCoreAttention)

        def keep(selected: Selected) -> None:
            chosen = selected.chosen
            if chosen is None:
                # No request of the step has more keys: all of them.
                tokens = slice(context.padded_active_token_count)
                count = context.gpu_view.token_to_position_in_request[tokens] + 1
                chosen = first_keys(count, layer.dsa.topk)
            record(chosen)

        layer.selection.recorder = keep
        return lambda: setattr(layer.selection, "recorder", None)

    topk = config.dsa_indexer_topk
    return TokenRecords(model, context, _layers(model), topk, torch.int32, follow)


def bytes_per_token(model: GPTModel) -> int:
    """Bytes that the records of one token take on this rank."""
    return sum(4 * layer.dsa.topk for layer in _layers(model))


def _layers(model: GPTModel) -> list[SparseCoreAttention]:
    """Of this stage, which may have none."""
    layers = (one for one in model.decoder.modules() if isinstance(one, SparseCoreAttention))
    return [one for one in layers if one.indexer is not None]
