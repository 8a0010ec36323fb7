"""Replay of a rollout's choices, experts and keys of sparse attention, in the update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from absorbed_mla.dsa.replay import replay_selections
from absorbed_mla.dsa.request_selections import RequestSelections, training_selections
from absorbed_mla.router_replay import replay_routed_experts, training_routed_experts
from rollout.samples import SampleBatch


def returned_choices(model: nn.Module, replay: bool) -> dict[str, bool]:
    """Options of ``LLM`` that return what the model chooses.

    Args:
        model: Of ``build_policy``.
        replay: The flag.

    Raises:
        ValueError: If the model chooses nothing that could be replayed.
    """
    sparse = model.config.experimental_attention_variant == "dsa"
    found = {
        "enable_return_routed_experts": bool(model.config.num_moe_experts),
        "enable_return_indexer_topk": sparse,
    }
    if replay and not any(found.values()):
        raise ValueError(
            "--replay needs a model with experts (--num-experts) or sparse attention "
            "(--dsa-indexer-topk), got one without"
        )
    return found if replay else {}


@contextlib.contextmanager
def replayed(model: nn.Module, batches: Sequence[SampleBatch]) -> Iterator[None]:
    """Use the choices that the samples have, if they have some, in a forward of each batch."""
    lengths = [batch.tokens.shape[-1] for batch in batches]
    any_sample = batches[0].samples[0]
    with contextlib.ExitStack() as stack:
        if any_sample.routed_experts is not None:
            each = [[one.routed_experts for one in batch.samples] for batch in batches]
            experts = training_routed_experts(each, lengths)
            stack.enter_context(replay_routed_experts(model, experts))
        if any_sample.indexer_topk is not None:
            keys = [
                [RequestSelections.of(model, one.indexer_topk) for one in batch.samples]
                for batch in batches
            ]
            selections = training_selections(keys, lengths)
            stack.enter_context(replay_selections(model, selections))
        yield
