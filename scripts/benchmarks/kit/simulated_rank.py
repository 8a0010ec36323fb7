"""One process in the place of one context-parallel rank: what others would send is copied here.

Everything but the communication is the real code. A message that another rank would send is a copy,
on the device, of what this rank sends, of the same size: the order of work and the bytes read and
written stay, the link between devices does not.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from absorbed_mla.cpu_host import enable_cpu_host
from benchmarks.kit.command import ALONE
from benchmarks.kit.processes import CPU, Processes

# Writes what is received to a buffer [...], given what this rank sends in the same operation.
Receive = Callable[[Tensor, Tensor], Any]


def _copy_own(buffer: Tensor, sent: Tensor) -> None:
    """As if every other rank sent the same."""
    parts = buffer.view(-1, *sent.shape)
    parts.copy_(sent.expand_as(parts))


class SimulatedRank(Processes):
    """One rank of a context-parallel group that has no other process.

    Args:
        seed: Of the weights and inputs.
        rank: Which rank.
        size: Ranks of the group.
    """

    def __init__(self, seed: int, rank: int, size: int) -> None:
        for name, value in ALONE.items():
            os.environ.setdefault(name, value)
        self.device = CPU
        if not enable_cpu_host():
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.rank, self.size = rank, size
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        # Gloo's would wait for processes that are not there.
        parallel_state.initialize_model_parallel(
            context_parallel_size=size, create_gloo_process_groups=False
        )
        self._seed = seed
        self.begin_again()

    def begin_again(self) -> None:
        """Draw the same weights and input once more."""
        torch.manual_seed(self._seed)
        tensor_parallel.model_parallel_cuda_manual_seed(self._seed)
        self._generator = torch.Generator(self.device).manual_seed(self._seed + self.rank)


class Finished:
    """An operation whose work is queued; a stream that waits for it waits for that work.

    Args:
        device: Of its buffers; what its current stream holds by now is waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> bool:
        """Let the current stream wait."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return True


@dataclass
class Received:
    """What buffers of other ranks' messages got."""

    num_bytes: int = 0  # of all messages so far; a message that is summed counts for every rank


@contextlib.contextmanager
def exchange_by_copies(receive: Receive = _copy_own) -> Iterator[Received]:
    """Replace the communication of ours and of TransformerEngine's ring in a ``with`` block.

    That is PyTorch's all-gather, reduce-scatter and messages between two ranks.

    Args:
        receive: What fills a buffer. An all-gather gets all ranks' parts, a reduce-scatter the sum.
    """
    halves: list[tuple[bool, Tensor]] = []
    received = Received()

    def all_gather(output: Tensor, sent: Tensor, group=None, async_op=False):
        received.num_bytes += output.nbytes
        receive(output, sent)
        return Finished(sent.device) if async_op else None

    def reduce_scatter(output: Tensor, sent: Tensor, op=None, group=None, async_op=False):
        received.num_bytes += sent.nbytes
        if receive is _copy_own:
            # It reads every rank's part, as a sum does.
            torch.sum(sent.view(-1, *output.shape), 0, out=output)
        else:
            receive(output, sent)
        return Finished(sent.device) if async_op else None

    def half(is_buffer: bool, tensor: Tensor) -> Finished:
        if not halves or halves[-1][0] == is_buffer:
            halves.append((is_buffer, tensor))
            return Finished(tensor.device)
        _, other = halves.pop()
        received.num_bytes += tensor.nbytes
        receive(*((tensor, other) if is_buffer else (other, tensor)))
        return Finished(tensor.device)

    def isend(tensor: Tensor, dst=None, group=None, tag=0, group_dst=None):
        return half(False, tensor)

    def irecv(tensor: Tensor, src=None, group=None, tag=0, group_src=None):
        return half(True, tensor)

    def batch_isend_irecv(operations):
        return [half(one.op is irecv, one.tensor) for one in operations][-1:]

    replaced = {
        "all_gather_into_tensor": all_gather,
        "reduce_scatter_tensor": reduce_scatter,
        "isend": isend,
        "irecv": irecv,
        "batch_isend_irecv": batch_isend_irecv,
    }
    with contextlib.ExitStack() as stack:
        # The second one compares operations with its own names.
        for module in (dist, distributed_c10d):
            stack.enter_context(mock.patch.multiple(module, **replaced))
        yield received
    assert not halves, "every message that was sent was received"
