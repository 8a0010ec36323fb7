"""Which selection a layer takes: its own, an earlier layer's, or one that it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from absorbed_mla.dsa.checkpoint_scope import Recomputation, current_recomputation
from absorbed_mla.dsa.config import DSAConfig
from absorbed_mla.dsa.pipeline_indices import passages


class Selected(NamedTuple):
    """A selection, int32 [S_q, B, topk], or None where every query has all keys that it sees."""

    chosen: Tensor | None


class _Latest(NamedTuple):
    """The selection on its way to the layers that share it, and the checkpoint it was made in."""

    source: int
    selected: Selected
    recomputation: Recomputation | None


@dataclass(eq=False)
class Neighbours:
    """What the layers built with one config know of each other.

    Attributes:
        last_built: Number of the layer built last.
        latest: The selection for the layers that follow in this forward.
    """

    last_built: int = 0
    latest: _Latest | None = None


# By the config, which all layers of a pipeline stage are built with.
_neighbours: WeakIdKeyDictionary = WeakIdKeyDictionary()


class LayerSelection:
    """The selections of one layer, of one forward after the other.

    Args:
        config: Of the model.
        dsa: Read for the layers that share selections.
        layer_number: Counted from 1, over all pipeline stages.
        pp_group: The pipeline's stages; None where there is one.

    Attributes:
        recorder: Gets the selection of every forward, if there is one.
        replayed: Gives the selections of the forwards to come, if there is one.

    Raises:
        ValueError: If the layer shares a selection, and the layer before it is missing.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        dsa: DSAConfig,
        layer_number: int,
        pp_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.layer_number = layer_number
        self.source = dsa.source_layer(layer_number)
        self.shares = self.source != layer_number
        is_last = layer_number == config.num_layers
        self.is_shared_next = not is_last and dsa.source_layer(layer_number + 1) == self.source
        self.recorder: Callable[[Selected], Any] | None = None
        self.replayed: Iterator[Selected] | None = None
        self._neighbours: Neighbours = _neighbours.setdefault(config, Neighbours())
        self._arrival, self._departure = passages(config, dsa, pp_group, layer_number)
        begins = self._neighbours.last_built != layer_number - 1
        if self.shares and begins and self._arrival is None:
            raise ValueError(
                f"layer {layer_number} shares the selection of layer {self.source}, but "
                f"layer {layer_number - 1} was not built before it: in a HybridModel let every "
                "pipeline stage begin with a layer that has an indexer "
                f"(dsa_indexer_topk_freq={dsa.topk_freq}, "
                f"dsa_indexer_skip_topk_offset={dsa.skip_topk_offset})"
            )
        self._neighbours.last_built = layer_number

    @property
    def crosses_stages(self) -> bool:
        """Whether the selection comes from another pipeline stage, or goes to one."""
        return self._arrival is not None or self._departure is not None

    def get(
        self,
        select: Callable[[], Tensor | None],
        shape: Sequence[int] | None,
        device: torch.device,
        *,
        repeated: bool = False,
    ) -> Tensor | None:
        """The selection of one forward.

        Args:
            select: Makes the layer's own.
            shape: Of the selection; None where every query has all keys that it sees.
            device: Where it is.
            repeated: Whether each layer may run several times before the next one, as when Megatron
                captures it in a CUDA graph: what is shared is then kept until the next forward.

        Raises:
            ValueError: If the layer whose selection is shared did not run just before, or there is
                nothing left to replay.
        """
        recomputation = current_recomputation()
        if recomputation is not None and self in recomputation.seen:
            return self._again(select, recomputation).chosen
        if self._arrival is not None:
            received = None if shape is None else self._arrival.receive(shape, device)
            found, kept = Selected(received), True
        elif self.shares:
            found, kept = self._shared(recomputation)
        elif self.replayed is not None:
            found, kept = self._next_replayed(device), True
        else:
            found, kept = Selected(select()), False
        if self.recorder is not None:
            self.recorder(found)
        if recomputation is not None:
            recomputation.seen.add(self)
            if kept:
                recomputation.kept[self] = found
        if self._departure is not None and found.chosen is not None:
            self._departure.send(found.chosen)
        if self.is_shared_next and self._departure is None:
            self._neighbours.latest = _Latest(self.source, found, recomputation)
        elif self.shares and not repeated:
            # The tensor must not outlive the forward.
            self._neighbours.latest = None
        return found.chosen

    def _again(self, select: Callable[[], Tensor | None], recomputation: Recomputation) -> Selected:
        """What the first run had; what layers in the same checkpoint share is made again."""
        found = recomputation.kept.get(self)
        if found is None:
            found = recomputation.kept[_SHARED] if self.shares else Selected(select())
        if self.is_shared_next:
            recomputation.kept[_SHARED] = found
        return found

    def _shared(self, recomputation: Recomputation | None) -> tuple[Selected, bool]:
        """The selection of the source, and whether it was made outside of the checkpoint."""
        latest = self._neighbours.latest
        if latest is None or latest.source != self.source:
            raise ValueError(
                f"layer {self.layer_number} shares the selection of layer {self.source}, which "
                "did not run before it in this forward"
            )
        return latest.selected, latest.recomputation is not recomputation

    def _next_replayed(self, device: torch.device) -> Selected:
        assert self.replayed is not None
        try:
            [chosen] = next(self.replayed)
            return Selected(None if chosen is None else chosen.to(device))
        except StopIteration:
            raise ValueError(
                f"there is no selection left to replay for layer {self.layer_number}: the model "
                "was called more often than in record_selections"
            ) from None


# Key of the selection on its way to the next layer of a recomputation.
_SHARED = "shared"
