"""A benchmark's processes, where there is but this one."""

from __future__ import annotations

import torch


class OneCPU:
    """In place of ``Processes``, without process groups."""

    on_gpu, dtype, device = False, torch.float32, torch.device("cpu")

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def reseed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)

    def synchronize(self) -> None:
        pass

    leave = synchronize
