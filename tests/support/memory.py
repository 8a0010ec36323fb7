"""Peak memory of tensors, counted from their storages, on any device."""

import weakref

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Bytes of all storages that were created inside the block and are alive: now, and the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Storages of arguments existed before the call.
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor):
                self._known.add(x.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self._see(x.untyped_storage())
        return result

    def _see(self, storage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, storage.nbytes())

    def _gone(self, size: int) -> None:
        self.now -= size
