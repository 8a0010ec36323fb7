"""New weights of a loaded model, from whole tensors that arrive one after the other."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from absorbed_mla.serving.weights.live_weights import shares
from checkpoint_conversion.errors import raise_problems
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession
from checkpoint_conversion.mapping import without_mtp_layers
from checkpoint_conversion.model import DTYPES, ModelConfig

# Name, dtype and shape of each tensor, in the order in which they come.
Shapes = Sequence[tuple[str, torch.dtype, tuple[int, ...]]]


class WeightUpdate:
    """An update of this rank's weights; making it is collective over the model's ranks.

    A weight is set as soon as all tensors that it is made of have arrived; what is kept until then
    are single tensors, such as the gate of an MLP until its up-projection comes.

    Args:
        model: Of this rank.
        config: Of the whole model.
        drafts: Whether the model has the multi-token-prediction layers of its config.
        shapes: Of the tensors that will come, under Hugging Face's names.

    Attributes:
        shapes: The same.

    Raises:
        ValueError: On every rank, listing the tensors that do not fit the model; none is set.
    """

    def __init__(
        self, model: GPTModel, config: ModelConfig, shapes: Shapes, *, drafts: bool
    ) -> None:
        raise_problems(
            f"weights must have a dtype of {', '.join(DTYPES)}, such as hf_weights(fp8=False) "
            "gives; got",
            [f"{name}: {dtype}" for name, dtype, _ in shapes if dtype not in DTYPES.values()],
        )
        tensors = {name: self._lazy(name, dtype, shape) for name, dtype, shape in shapes}
        if not drafts:
            tensors = without_mtp_layers(tensors, config)
            config = dataclasses.replace(config, mtp_layers=0)
        self.shapes = shapes
        self._plan = shares(model, config, tensors)
        self._arrived: dict[str, Tensor] = {}
        self.begin()

    def begin(self) -> None:
        """Nothing has come; also of a second update with tensors of the same shapes."""
        self._arrived.clear()
        self._missing = {i: set(share.leaves) for i, (_, share) in enumerate(self._plan)}
        # By tensor, the weights that still need it.
        self._users: dict[str, set[int]] = collections.defaultdict(set)
        for i, names in self._missing.items():
            for name in names:
                self._users[name].add(i)

    def _lazy(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> LazyTensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return LazyTensor(
            shape, dtype, lambda session: self._arrived[name], frozenset({name}), nbytes
        )

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the weights that these tensors complete; their memory may be used again after it."""
        for name, tensor in tensors.items():
            users = self._users.get(name, set())
            if users:
                self._arrived[name] = tensor
            for i in sorted(users):
                self._missing[i].discard(name)
                if not self._missing[i]:
                    self._set(i)
        for name in self._arrived.keys() & tensors.keys():
            self._arrived[name] = self._arrived[name].clone()

    def _set(self, i: int) -> None:
        del self._missing[i]
        weight, share = self._plan[i]
        with ReadSession() as session:
            share.copy_to(weight, session)
        for name in share.leaves:
            self._users[name].discard(i)
            if not self._users[name]:
                del self._arrived[name]

    def finish(self) -> None:
        """Check that every weight was set.

        Raises:
            RuntimeError: If tensors have not come.
        """
        if self._missing:
            names = sorted(set().union(*self._missing.values()))
            raise RuntimeError(f"{len(self._missing)} weights were not set; no {names[0]} has come")
