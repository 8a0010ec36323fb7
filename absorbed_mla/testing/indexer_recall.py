"""Recall of a DSA indexer: the share of dense attention's top-k keys that it selects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from absorbed_mla.core_attention.masks.spans import Spans
from absorbed_mla.core_attention.types import AttentionInputs
from absorbed_mla.dsa.core_attention import SparseCoreAttention
from absorbed_mla.dsa.index_sharing import Selected
from absorbed_mla.dsa.indexer_loss import HeadSum
from absorbed_mla.dsa.key_subset import CHUNK_ELEMENTS, VisibleKeys, visible_keys
from absorbed_mla.dsa.replay import selecting_layers
from absorbed_mla.dsa.selection import best_keys
from absorbed_mla.dsa.sparse_reference import latent_inputs


@dataclass(frozen=True)
class Recall:
    """Counts over queries that see more keys than the top-k; the others choose nothing.

    Attributes:
        wanted: Keys that should be chosen: the top-k of every such query.
        found: Those of them that are chosen.
        by_chance: Expected number of them in a random choice: top-k squared over the visible keys.
    """

    wanted: int = 0
    found: int = 0
    by_chance: float = 0.0

    def __add__(self, other: Recall) -> Recall:
        """The counts of both."""
        return Recall(
            self.wanted + other.wanted, self.found + other.found, self.by_chance + other.by_chance
        )

    @property
    def share(self) -> float:
        """Recall, from 0 to 1; NaN where no query had a choice."""
        return self.found / self.wanted if self.wanted else float("nan")

    @property
    def share_by_chance(self) -> float:
        """Expected recall of a random choice."""
        return self.by_chance / self.wanted if self.wanted else float("nan")


@torch.no_grad()
def selection_recall(
    chosen: Tensor,
    inputs: AttentionInputs,
    spans: Spans,
    scale: float,
    *,
    tp_group: dist.ProcessGroup | None = None,
    elements: int = CHUNK_ELEMENTS,
) -> Recall:
    """Compare a selection with the keys of the highest probability in dense attention.

    The probability of a key is the sum over heads of softmax(scores of all visible keys): the
    target of the indexer's loss. Of equal probabilities the lower index counts as higher. The
    scores of one chunk of queries exist at a time.

    Args:
        chosen: int32 [S_q, B, topk] on the key axis, -1 for none.
        inputs: Those of the attention in the absorbed form, this rank's heads.
        spans: Which queries see which keys.
        scale: Multiplies the scores.
        tp_group: Ranks over which the heads are split; None for one.
        elements: Most numbers of a chunk's scores.
    """
    topk = chosen.shape[-1]
    dtype = torch.promote_types(inputs.q_content.dtype, torch.float32)
    probabilities = HeadSum(inputs, None, scale, dtype)
    total = Recall()
    for keys in visible_keys(spans, chosen.shape[1], chosen.device, elements):
        has_choice = keys.num_seen > topk
        if not has_choice.any():
            continue
        mass = probabilities(keys)
        if tp_group is not None:
            dist.all_reduce(mass, group=tp_group)
        wanted = _places(best_keys(mass, keys, topk), keys)
        own = _places(chosen[keys.queries].transpose(0, 1), keys)
        # The place after the last key is for none; queries with a choice want none of it.
        marked = mass.new_zeros(*mass.shape[:2], keys.span.num_keys + 1, dtype=torch.bool)
        marked.scatter_(-1, wanted, True)
        queries = int(has_choice.sum()) * chosen.shape[1]
        total += Recall(
            wanted=queries * topk,
            found=int(marked.gather(-1, own)[:, has_choice].sum()),
            by_chance=float((topk**2 / keys.num_seen[has_choice]).sum()) * chosen.shape[1],
        )
    return total


def _places(indices: Tensor, keys: VisibleKeys) -> Tensor:
    """Indices on the key axis as places in the keys of a chunk; the place after them for none."""
    place = indices.long() - keys.span.key_start
    outside = (indices < 0) | (place < 0) | (place >= keys.span.num_keys)
    return place.masked_fill(outside, keys.span.num_keys)


@contextmanager
def measure_recall(model: nn.Module, *, attend_to_all: bool = False) -> Iterator[dict[str, Recall]]:
    """Measure the recall of every indexer in the forwards inside of the ``with`` block.

    Run them without gradients and without an inference context: a step of generation has the
    queries of a few tokens, and is refused. Context- and data-parallel ranks count their own
    queries.

    Args:
        model: A model with sparse attention, or its wrapper.
        attend_to_all: Whether the attention is over all visible keys in these forwards, as in the
            warm-up, while the indexers choose their top-k all the same.

    Yields:
        Recall by the name of a layer's core attention; it grows with every forward.

    Raises:
        ValueError: If the model has no layer with an indexer, or attends to all keys while a
            pipeline stage waits for the selection of another one.
    """
    found: dict[str, Recall] = {}
    sparse = (layer for layer in model.modules() if isinstance(layer, SparseCoreAttention))
    if attend_to_all and any(layer.selection.crosses_stages for layer in sparse):
        raise ValueError(
            "attend_to_all=True needs pipeline stages that begin with a layer that has an indexer: "
            "a stage would wait for the selection of the one before"
        )
    probes = [
        _Probe(name, layer, attend_to_all, found) for name, layer in selecting_layers(model).items()
    ]
    try:
        yield found
    finally:
        for probe in probes:
            probe.remove()


class _Probe:
    """Stands in for methods of a layer: where keys are chosen, and where they were used."""

    def __init__(
        self, name: str, layer: SparseCoreAttention, attend_to_all: bool, found: dict[str, Recall]
    ) -> None:
        self._name, self._layer, self._found = name, layer, found
        self._attend_to_all = attend_to_all
        self._chosen: Tensor | None = None
        self._leave, self._learn = layer.selection.leave, layer.learn_choice
        found[name] = Recall()
        layer.selection.leave = self._take_over  # type: ignore[method-assign]
        layer.learn_choice = self._compare  # type: ignore[method-assign]
        layer.choose_cached_keys = _refuse_cached  # type: ignore[method-assign]

    def remove(self) -> None:
        # The class's own methods are seen again.
        del self._layer.selection.leave
        del self._layer.learn_choice
        del self._layer.choose_cached_keys

    def _take_over(self, selected: Selected) -> Selected:
        self._chosen = selected.chosen
        return self._leave(Selected(None) if self._attend_to_all else selected)

    def _compare(self, plan: Any, core_out: Tensor, lse: Tensor, query: Any, kv: Tensor) -> Tensor:
        if self._chosen is not None:
            [block] = plan.keys.blocks(kv, keep=False)
            self._found[self._name] += selection_recall(
                self._chosen,
                latent_inputs(*query, block.kv),
                plan.keys.spans(),
                self._layer.softmax_scale,
                tp_group=self._layer._tp_group,
            )
            self._chosen = None
        return self._learn(plan, core_out, lse, query, kv)


def _refuse_cached(*args: Any) -> None:
    raise ValueError(
        "measure_recall is for forwards without an inference_context: give the model whole texts, "
        "prompt and answer, instead of generating inside of it"
    )
