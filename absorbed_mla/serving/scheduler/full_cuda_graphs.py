"""Full CUDA graphs: each holds all kernels of a step, and is captured with one of its size."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.inference.contexts import DynamicInferenceContext
from torch import Tensor, nn

from absorbed_mla.caching import full_cuda_graph
from absorbed_mla.serving.megatron_engine.attributes import device_tables
from absorbed_mla.serving.megatron_engine.names import LAYER_GRAPHS

# All that live: NCCL cannot destroy a process group while a graph holds one of its collectives.
_LIVING: weakref.WeakSet[FullCudaGraphs] = weakref.WeakSet()

# Memory of steps grows with their tokens, but for some tensors with their rows: of much larger
# steps nothing is known.
_MOST_LARGER = 4


class FullCudaGraphs:
    """Full CUDA graphs of a model's steps, each captured once; they read weights where they are.

    Graphs share a pool of memory: only one of them runs at a time, and what they leave behind is
    in tensors of others. A capture takes from the pool what is free, but of a large tensor only in
    one piece, so that the pool would grow with each step that is larger than those before it: one
    that is not the largest takes the memory of larger ones, too.

    Args:
        model: Its layers' own graphs are not used inside of a step's.

    Attributes:
        begin_step: Called before every step, to set what it reads on the device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.begin_step: Callable[[], None] = lambda: None
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._last: torch.cuda.CUDAGraph | None = None
        self._pool: tuple[int, int] | None = None
        # Bytes that were taken at once, and a graph whose life keeps them in the pool.
        self._room: tuple[int, torch.cuda.CUDAGraph | None] = 0, None
        self._places: Sequence[int] = ()
        self._buffers: Sequence[int] = ()
        _LIVING.add(self)

    def __contains__(self, key: Hashable) -> bool:
        """Whether a step of this key has been captured."""
        return key in self._graphs

    def run(self, key: Hashable, step: Callable[[], None], larger: float | None = None) -> None:
        """Run a step, or the graph that was captured when one of this key ran first.

        Args:
            key: Of all that the step's work depends on, beside the values in tensors.
            step: Repeatable; on the current stream.
            larger: How many times its tokens the largest step has; None: no memory is taken for
                larger ones.
        """
        self.begin_step()
        if key not in self._graphs:
            self._graphs[key] = self._captured(step, larger)
        self._last = self._graphs[key]
        self._last.replay()

    def repeat(self) -> None:
        """Replay the graph that ran last, to measure it."""
        assert self._last is not None, "a step has run"
        self._last.replay()

    def keep_if_weights_stay(self) -> None:
        """Delete all graphs if a weight is elsewhere than at the last call."""
        tensors = (*self._model.parameters(), *self._model.buffers())
        places = tuple(map(_place, tensors))
        if places != self._places:
            self.clear()
            self._places = places

    def keep_for(self, context: DynamicInferenceContext) -> None:
        """Delete all graphs if they read another cache, or other tables, than this context's."""
        buffers = context.memory_buffer.data_ptr(), device_tables(context).data_ptr()
        if buffers != self._buffers:
            self.clear()
            self._buffers = buffers

    def clear(self) -> None:
        """Delete all graphs; they are captured anew where they are needed."""
        self._graphs.clear()
        self._pool = self._last = None
        self._room = 0, None

    def _captured(self, step: Callable[[], None], larger: float | None) -> torch.cuda.CUDAGraph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with _without_layer_graphs(self._model):
            before = torch.cuda.memory_allocated()
            if larger is not None:
                torch.cuda.reset_peak_memory_stats()
            # Kernels are compiled, and libraries start, outside of a capture.
            with full_cuda_graph():
                step()
            torch.cuda.synchronize()
            if larger is not None:
                self._make_room(torch.cuda.max_memory_allocated() - before, larger)
            with self._capture(graph), full_cuda_graph():
                step()
        return graph

    def _make_room(self, needed: int, larger: float) -> None:
        """Take the memory of larger steps at once, where this one's is not there, and theirs is."""
        if needed <= self._room[0]:
            return
        if larger == 1:  # its own memory is there for all that follow
            self._room = needed, self._room[1]
            return
        room = int(needed * min(larger, _MOST_LARGER))
        if room > torch.cuda.mem_get_info()[0]:
            return
        graph = torch.cuda.CUDAGraph()
        with self._capture(graph):
            torch.zeros(room, dtype=torch.uint8, device="cuda")
        self._room = room, graph

    def _capture(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        # Other threads, NCCL's among them, may call CUDA meanwhile.
        return torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")


def _place(tensor: Tensor) -> int:
    """Its address; of a tensor that is made of others, which one it is."""
    plain = type(tensor) in (Tensor, nn.Parameter)
    return tensor.data_ptr() if plain else id(tensor)


def clear_all() -> None:
    """Delete the graphs of all engines of the process."""
    for graphs in list(_LIVING):
        graphs.clear()


@contextlib.contextmanager
def _without_layer_graphs(model: nn.Module) -> Iterator[None]:
    """Run layers themselves inside the block: a capture cannot hold another graph's replay."""
    spaces: list[dict[str, Any]] = []
    for module in model.modules():
        spaces += vars(module), module._modules
    name = LAYER_GRAPHS.name
    holders = [(space, space[name]) for space in spaces if name in space]
    for space, _ in holders:
        del space[name]
    try:
        yield
    finally:
        for space, manager in holders:
            space[name] = manager
