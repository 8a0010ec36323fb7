"""A stand-in for CUDA graphs on a CPU: it records PyTorch's operators and repeats them.

As on a GPU, a replay runs no Python: it reads and writes the tensors of the capture. Unlike there,
their memory is never given to others, so that use after freeing does not show.
"""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from megatron.core.tensor_parallel import random as host_random
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators that wait for a GPU, or copy from memory of the host: no graph can hold them.
_ON_HOST = ("_local_scalar_dense", "nonzero", "lift_fresh", "is_nonzero", "equal", "masked_select")


class OnDevice(TorchDispatchMode):
    """Raises at what waits for a GPU: values read by the host, tensors made from its values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in _ON_HOST:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        found = func(*args, **(kwargs or {}))
        self.ran(func, args, kwargs or {}, found)
        return found

    def ran(self, func: Callable, args: tuple, kwargs: dict, found: object) -> None:
        """Called after every operator."""


class RecordedGraph(OnDevice):
    """In place of ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Callable[[], None]] = []

    def register_generator_state(self, state: object) -> None:
        """Nothing random is recorded."""

    def ran(self, func, args, kwargs, found):
        """Record an operator, but for views: those of the capture see what is written."""
        results = _tensors(found)
        known = {_address(x) for x in _tensors((args, kwargs))}
        new = [x for x in results if _address(x) not in known]
        if not new and not func._schema.is_mutable:
            return

        def again() -> None:
            for old, computed in zip(results, _tensors(func(*args, **kwargs))):
                if any(old is x for x in new):
                    old.copy_(computed)

        self._steps.append(again)

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operators again."""
        for step in self._steps:
            step()


@pytest.fixture
def recorded_graphs(monkeypatch) -> None:
    """Megatron's graphs of impl ``local`` are recorded ones."""

    @contextlib.contextmanager
    def capture(graph: RecordedGraph, **_: object) -> Iterator[None]:
        with graph:
            yield

    nothing = lambda *args, **kwargs: None  # noqa: E731
    for owner, names in {
        torch.cuda: ("graph_pool_handle", "set_stream", "default_stream"),
        torch._C: ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool"),
        # A graph's memory stays: what a checkpoint drops is written again by every replay.
        torch.UntypedStorage: ("resize_",),
    }.items():
        for name in names:
            monkeypatch.setattr(owner, name, nothing, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(host_random, "_get_share_storage", lambda: _recorded_copy)


@torch.no_grad()
def _recorded_copy(dst: Tensor, src: Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(dst):
        dst.detach().copy_(src.detach())


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata
