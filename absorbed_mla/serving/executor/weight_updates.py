"""Weights of a rank's loaded model: their updates, and their memory while the engine sleeps."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from absorbed_mla.serving.weights.memory import WeightMemory
from absorbed_mla.serving.weights.transfer import Receiver
from absorbed_mla.serving.weights.update import Shapes, WeightUpdate
from checkpoint_conversion.model import ModelConfig


@dataclass(frozen=True)
class UpdateFailure:
    """Why weights were not updated.

    Attributes:
        message: For the user.
        changed: Whether some weights have changed.
        refused: Whether the model, or what was asked, is to blame and not the transfer.
    """

    message: str
    changed: bool
    refused: bool


class LoadedWeights:
    """The weights of this rank's model, which came from a checkpoint.

    Args:
        model: On its device.
        config: Of the checkpoint.
        drafts: Whether the model has the multi-token-prediction layers of the config.
    """

    def __init__(self, model: GPTModel, config: ModelConfig, *, drafts: bool) -> None:
        self._model, self._config, self._drafts = model, config, drafts
        self._memory = WeightMemory(model)
        # The last one, which has a process group, and its address and rank.
        self._kept: tuple[tuple[str, int], Receiver] | None = None
        # The last one; planning takes longer than many a transfer.
        self._planned: WeightUpdate | None = None

    def free(self, *, discard: bool) -> None:
        """Free their memory; see :meth:`WeightMemory.free`."""
        self._memory.free(discard=discard)

    def allocate(self) -> None:
        """Have their memory again; see :meth:`WeightMemory.allocate`."""
        self._memory.allocate()

    def update(self, weights: Any, rank_offset: int, timeout: float) -> UpdateFailure | None:
        """Set all weights; collective over the model's ranks.

        Args:
            weights: The address of a sender; or, in this process, what has ``shapes`` and iterates
                over names and whole tensors.
            rank_offset: The rank of this model's first process among a sender's receivers.
            timeout: Seconds that it waits for a sender.
        """
        changes = _Changes(self)
        try:
            if isinstance(weights, str):
                self._receive(weights, rank_offset + dist.get_rank(), timeout, changes)
            else:
                changes.accept(weights.shapes)
                with contextlib.closing(iter(weights)) as pairs:
                    for name, tensor in pairs:
                        changes.load({name: tensor})
            changes.finish()
        except Exception as error:
            self._planned = None
            refused = isinstance(error, ValueError) and not changes.begun
            name = "" if refused else f"{type(error).__name__}: "
            return _of_all_ranks(UpdateFailure(f"{name}{error}", changes.begun, refused))
        return _of_all_ranks(None)

    def planned(self, shapes: Shapes) -> WeightUpdate:
        """An update of tensors that will come; see :class:`WeightUpdate`."""
        if self._planned is not None and self._planned.shapes == shapes:
            self._planned.begin()
        else:
            self._planned = None
            self._planned = WeightUpdate(self._model, self._config, shapes, drafts=self._drafts)
        return self._planned

    def _receive(self, address: str, rank: int, timeout: float, changes: _Changes) -> None:
        key, kept, self._kept = (address, rank), self._kept, None
        # A sender that has ended may have been followed by another one at its address.
        if kept is None or kept[0] != key or not kept[1].is_connected():
            device = next(self._model.parameters()).device
            kept = key, Receiver(address, rank, device, timeout)
        kept[1].receive(changes.accept, changes.load)
        if kept[1].has_process_group:
            self._kept = kept


def _of_all_ranks(own: UpdateFailure | None) -> UpdateFailure | None:
    """The worst failure of any rank, on all of them."""
    found = [own] * dist.get_world_size()
    if len(found) > 1:
        dist.all_gather_object(found, own)
    return min(filter(None, found), key=lambda one: not one.changed, default=None)


class _Changes:
    """One update; nothing is touched before its first tensors are there.

    Attributes:
        begun: Whether weights have changed.
    """

    def __init__(self, weights: LoadedWeights) -> None:
        self._weights, self.begun = weights, False
        self._update: WeightUpdate | None = None

    def accept(self, shapes: Shapes) -> None:
        self._update = self._weights.planned(shapes)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        assert self._update is not None
        if not self.begun:
            # Steps in flight end with the weights that they began with.
            torch.cuda.synchronize()
            self.begun = True
            self._weights.allocate()
        self._update.load(tensors)

    def finish(self) -> None:
        assert self._update is not None
        self._update.finish()
        torch.cuda.synchronize()
