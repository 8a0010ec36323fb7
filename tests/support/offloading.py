"""Megatron's fine-grained activation offloading on a CPU, whose copies are then to the same memory.

Beyond what Megatron checks, a tensor must not be asked for before the backward of its group has
begun, where Megatron waits for its copy: on a GPU it might not be there.
"""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from megatron.core.extensions import transformer_engine
from megatron.core.pipeline_parallel import fine_grained_activation_offload as host
from torch import Tensor, nn


class OffloadingOnACPU:
    """Makes tensors of a CPU offloadable while ``monkeypatch`` lasts.

    Attributes:
        offloaded: Storages of all tensors that were copied away.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offloaded: list[int] = []
        self._begun: Counter[str] = Counter()
        chunk = host.ChunkOffloadHandler
        self._pop, self._commit, self._offload = (
            chunk.tensor_pop,
            chunk.on_group_commit_backward,
            chunk.offload,
        )
        support = SimpleNamespace(CPUOffloadEnabled=False)
        monkeypatch.setattr(transformer_engine, "cpu_offload", support)
        manageable = staticmethod(lambda tensor: not isinstance(tensor, nn.Parameter))
        monkeypatch.setattr(chunk, "_can_manage_tensor_for_offload", manageable)
        monkeypatch.setattr(chunk, "tensor_pop", lambda *args: self._checked_pop(*args))
        monkeypatch.setattr(chunk, "on_group_commit_backward", lambda *args: self._begin(*args))
        monkeypatch.setattr(chunk, "offload", lambda *args, **more: self._noted(*args, **more))
        monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
        monkeypatch.setattr(host, "print_offload_summary_table", lambda sent: None)
        host.PipelineOffloadManager.reset_instance()

    def begin_step(self) -> None:
        """What Megatron's schedules do."""
        self._begun.clear()
        host.FineGrainedActivationOffloadingInterface.reset()

    @property
    def sent(self) -> dict[str, int]:
        """Bytes by module, known when the second step begins."""
        return host.PipelineOffloadManager.get_instance().offload_summary_bytes

    def _noted(self, chunk, tensor: Tensor, *args, **more):
        self.offloaded.append(tensor.untyped_storage().data_ptr())
        return self._offload(chunk, tensor, *args, **more)

    def _begin(self, chunk, name: str) -> None:
        self._begun[name] += 1
        self._commit(chunk, name)

    def _checked_pop(self, chunk, tag) -> Tensor:
        if not isinstance(tag, torch.Tensor):
            group = chunk.offload_groups[tag[0] - 1]
            same = [one for one in chunk.offload_groups if one._name == group._name]
            least = len(same) - next(i for i, one in enumerate(same) if one is group)
            assert self._begun[group._name] >= least, f"{group._name} has not begun its backward"
        return self._pop(chunk, tag)
