"""Memory of a model's weights, which a sleeping engine gives back to its device."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, UntypedStorage

from absorbed_mla.serving.weights.live_weights import own_weights


class WeightMemory:
    """The memory of all parameters and buffers of a model; views of a weight stay views of it.

    Args:
        model: On its device.
    """

    def __init__(self, model: GPTModel) -> None:
        self._model = model
        # What was freed, how many bytes it had, and a copy of them unless they were discarded.
        self._freed: list[tuple[UntypedStorage, int, Tensor | None]] = []

    def free(self, *, discard: bool) -> None:
        """Give the memory back to the device.

        Args:
            discard: Forget what an update of the weights sets, and keep the rest, such as adapters
                and tables, in host memory. If not, all of it is kept; on a CPU it is there already.
        """
        self.allocate()
        updated = {one.untyped_storage().data_ptr() for one in own_weights(self._model).values()}
        for tensor in [*self._model.parameters(), *self._model.buffers()]:
            storage = tensor.untyped_storage()
            forgets = discard and storage.data_ptr() in updated
            # Freed with another view of it, or in host memory.
            if not storage.nbytes() or not (forgets or tensor.is_cuda):
                continue
            copy = None if forgets else _in_host_memory(storage)
            self._freed.append((storage, storage.nbytes(), copy))
            storage.resize_(0)

    def allocate(self) -> None:
        """Have the memory again, with what was kept."""
        while self._freed:
            storage, size, copy = self._freed.pop()
            storage.resize_(size)
            if copy is not None:
                _bytes_of(storage).copy_(copy)


def _in_host_memory(storage: UntypedStorage) -> Tensor:
    """A copy, on a CPU; of a GPU's in pinned memory, which copies at the bus's full rate."""
    pinned = storage.device.type == "cuda"
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
    return copy.copy_(_bytes_of(storage))


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """All bytes of a storage, uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
