"""Cross-layer index sharing: a layer's selection is its own, an earlier layer's, or a given one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from absorbed_mla.dsa.checkpoint_scope import CheckpointScope, current_scope, scope_checkpoints
from absorbed_mla.dsa.config import DSAConfig
from absorbed_mla.dsa.pipeline_indices import stage_p2p


class Selected(NamedTuple):
    """A selection, int32 [S_q, B, topk], or None where every query has all keys that it sees."""

    chosen: Tensor | None


class _Latest(NamedTuple):
    """The selection for the layers that share it, and the checkpoint it was made in."""

    source: int
    selected: Selected
    scope: CheckpointScope | None


@dataclass(eq=False)
class SharedIndices:
    """What the layers built with one config share.

    Attributes:
        last_built: Number of the layer built last.
        latest: The selection for the layers that follow in this forward.
    """

    last_built: int = 0
    latest: _Latest | None = None


# By the config, which all layers of a pipeline stage are built with.
_shared_indices: WeakIdKeyDictionary = WeakIdKeyDictionary()


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
        scope_checkpoints()
        self.layer_number = layer_number
        self.source = dsa.source_layer(layer_number)
        self.shares = self.source != layer_number
        is_last = layer_number == config.num_layers
        self.is_shared_next = not is_last and dsa.source_layer(layer_number + 1) == self.source
        self.recorder: Callable[[Selected], Any] | None = None
        self.replayed: Iterator[Selected] | None = None
        self._sharing: SharedIndices = _shared_indices.setdefault(config, SharedIndices())
        self._previous_stage, self._next_stage = stage_p2p(config, dsa, pp_group, layer_number)
        begins = self._sharing.last_built != layer_number - 1
        if self.shares and begins and self._previous_stage is None:
            raise ValueError(
                f"layer {layer_number} shares the selection of layer {self.source}, but "
                f"layer {layer_number - 1} was not built before it: in a HybridModel let every "
                "pipeline stage begin with a layer that has an indexer "
                f"(dsa_indexer_topk_freq={dsa.topk_freq}, "
                f"dsa_indexer_skip_topk_offset={dsa.skip_topk_offset})"
            )
        self._sharing.last_built = layer_number

    @property
    def crosses_stages(self) -> bool:
        """Whether the selection comes from another pipeline stage, or goes to one."""
        return self._previous_stage is not None or self._next_stage is not None

    def take(self, shape: Sequence[int] | None, device: torch.device) -> Selected | None:
        """The selection of a forward that comes from elsewhere; None: the layer makes its own.

        Args:
            shape: Of the selection; None where every query has all keys that it sees.
            device: Where it is.

        Raises:
            ValueError: If the layer whose selection is shared did not run just before, or there is
                nothing left to replay.
        """
        scope = current_scope()
        if scope is not None and self in scope.seen:
            # What layers in the same checkpoint share is made again.
            return scope.kept.get(self, scope.kept.get(_SHARED) if self.shares else None)
        if self._previous_stage is not None:
            return Selected(None if shape is None else self._previous_stage.receive(shape, device))
        if self.shares:
            return self._shared().selected
        return None if self.replayed is None else self._next_replayed(device)

    def leave(self, found: Selected, *, repeated: bool = False) -> None:
        """Record the selection of a forward, and leave it for who needs it.

        Args:
            found: What :meth:`take` gave, or the layer's own.
            repeated: Whether each layer may run several times before the next one, as when Megatron
                captures it in a CUDA graph: what is shared is then kept until the next forward.
        """
        scope = current_scope()
        if scope is not None and self in scope.seen:
            if self.is_shared_next:
                scope.kept[_SHARED] = found
            return
        if self.recorder is not None:
            self.recorder(found)
        if scope is not None:
            scope.seen.add(self)
            if self._is_from_outside(scope):
                scope.kept[self] = found
        if self._next_stage is not None and found.chosen is not None:
            self._next_stage.send(found.chosen)
        if self.is_shared_next and self._next_stage is None:
            self._sharing.latest = _Latest(self.source, found, scope)
        elif self.shares and not repeated:
            # The tensor must not outlive the forward.
            self._sharing.latest = None

    def _is_from_outside(self, scope: CheckpointScope) -> bool:
        """Whether the recomputation of a checkpoint could not make this forward's selection."""
        if self.shares and self._previous_stage is None:
            return self._shared().scope is not scope
        return self.shares or self.replayed is not None

    def _shared(self) -> _Latest:
        """The selection of the source."""
        latest = self._sharing.latest
        if latest is None or latest.source != self.source:
            raise ValueError(
                f"layer {self.layer_number} shares the selection of layer {self.source}, which "
                "did not run before it in this forward"
            )
        return latest

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
