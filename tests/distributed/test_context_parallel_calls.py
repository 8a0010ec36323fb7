"""Context parallelism through calls of dense blocks, and one rank without the others.

Run as ``torchrun --nproc-per-node N -m pytest tests/distributed`` with N = 2, 4.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from absorbed_mla.registry import ATTENTION_BACKENDS
from benchmarks.kit.simulated_rank import Finished, exchange_by_copies
from tests.distributed.test_oracle_grid import form, layout
from tests.support import needs, world
from tests.support.cases import TINY
from tests.support.execution import execute
from tests.support.fake_packages.cudnn import PlainCudnn
from tests.support.harness import Setup, build_attention, own_tokens
from tests.support.layouts import cut_layout

pytestmark = needs.processes(2, 4)
cp_comm_type = pytest.mark.parametrize("cp_comm_type", ["all_gather", "p2p"])


class CountedCudnn(PlainCudnn):
    """Takes float64 on a CPU, and counts its calls."""

    name = "counted_cudnn"

    def __init__(self) -> None:
        self.forwards = self.backwards = 0

    def why_not(self, request):
        return None if request.form == "expanded" else "it computes the expanded form"

    def dense_forward(self, *call):
        self.forwards += 1
        return super().dense_forward(*call)

    def dense_backward(self, *call):
        self.backwards += 1
        return super().dense_backward(*call)


def calls_of_a_rank(cp_comm_type: str, rank: int, size: int) -> int:
    """For one causal sequence."""
    if cp_comm_type == "p2p":
        return size
    # Keys before both chunks; the late chunk and what lies before it, the early one likewise.
    return 4 if rank else 3


@layout
@cp_comm_type
def test_dense_blocks(whole_world_cp, cp_comm_type, layout):
    """Gradients are the oracle's, with as few calls as masks aligned at the top left need."""
    backend = CountedCudnn()
    setup = Setup(
        form="expanded",
        cp_comm_type=cp_comm_type,
        core_attention_backend=backend.name,
        expansion_chunk_size=2**20,
    )
    with ATTENTION_BACKENDS.registered(backend):
        execute(TINY, setup, cut_layout(layout, world.cp_size())).check()
    assert backend.forwards == backend.backwards
    if layout == "sbhd":
        rank, size = world.cp_group().rank(), world.cp_size()
        assert backend.forwards == calls_of_a_rank(cp_comm_type, rank, size)


@contextlib.contextmanager
def recorded(messages: list[Tensor]) -> Iterator[None]:
    """Every message that this rank receives, in the order in which it asks for them."""
    gather, scatter, batch = (
        dist.all_gather_into_tensor,
        dist.reduce_scatter_tensor,
        dist.batch_isend_irecv,
    )

    def finish(works, *buffers: Tensor) -> list:
        for work in works:
            work.wait()
        messages.extend(buffer.clone() for buffer in buffers)
        # Gloo's works hang if they are waited for twice.
        return [Finished(world.device())]

    def all_gather(output, sent, group=None, async_op=False):
        return finish([gather(output, sent, group=group, async_op=True)], output)[0]

    def reduce_scatter(output, sent, group=None, async_op=False):
        return finish([scatter(output, sent, group=group, async_op=True)], output)[0]

    def batch_isend_irecv(operations):
        buffers = (one.tensor for one in operations if one.op is dist.irecv)
        return finish(batch(operations), *buffers)

    with mock.patch.multiple(
        dist,
        all_gather_into_tensor=all_gather,
        reduce_scatter_tensor=reduce_scatter,
        batch_isend_irecv=batch_isend_irecv,
    ):
        yield


@needs.processes(2)
@form
@layout
@cp_comm_type
def test_a_rank_without_the_others(whole_world_cp, cp_comm_type, layout, form):
    """It computes what it computes among them, to the bit, once it is handed what they sent."""
    tokens, setup = cut_layout(layout, world.cp_size()), Setup(form=form, cp_comm_type=cp_comm_type)
    attention = build_attention(TINY, setup)
    x = own_tokens(tokens.random_rows(TINY.hidden, 1), tokens, setup, world.cp_group())
    x = x.detach().clone().requires_grad_()
    packed = tokens.packed_seq_params(world.device())

    def step() -> list[Tensor]:
        output, _ = attention(x, None, packed_seq_params=packed)
        grads = torch.autograd.grad(output.square().sum(), [x, *attention.parameters()])
        return [output.detach(), *grads]

    messages: list[Tensor] = []
    with recorded(messages):
        expected = step()
    received = iter(messages)
    with exchange_by_copies(lambda buffer, sent: buffer.copy_(next(received))):
        found = step()
    assert all(map(torch.equal, found, expected)) and not [*received]
    with exchange_by_copies():
        copies = step()
    assert all(a.shape == b.shape and a.isfinite().all() for a, b in zip(copies, expected))
    assert not torch.equal(copies[0], expected[0])
