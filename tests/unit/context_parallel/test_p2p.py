"""The ring of context parallelism in one process: whom a rank talks to, and in which precision."""

import pytest
import torch
from torch import Tensor

from absorbed_mla.context_parallel.layout import ContextParallelLayout
from absorbed_mla.context_parallel.strategies import p2p as ring
from absorbed_mla.context_parallel.strategies.p2p import Ring, Transfer
from absorbed_mla.sequences import SequenceLayout
from tests.unit.context_parallel.test_memory import Over

CP_SIZE, SHARE, WIDTH = 4, 2, 3


class Post:
    """Takes what is sent, and has delivered what the test has written."""

    def __init__(self, monkeypatch) -> None:
        self.sent: list[Tensor] = []
        self.to_come: list[Tensor] = []
        post = self

        class Delivered:
            def __init__(self, x: Tensor, group, rank: int) -> None:
                post.sent.append(x.clone())
                self.due = post.to_come.pop(0)

            def received(self) -> Tensor:
                return self.due

        monkeypatch.setattr(ring, "Transfer", Delivered)


def numbers(step: int) -> Tensor:
    """Of a gradient in fp32, with more digits than bf16 has."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SHARE, 1, WIDTH, generator=generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_are_summed_in_fp32(monkeypatch, dtype):
    """Whatever the latents' dtype; each sum to the bit, as bf16 loses what many ranks add."""
    post = Post(monkeypatch)
    layout = ContextParallelLayout(SequenceLayout.dense(SHARE * CP_SIZE), CP_SIZE, 0)
    keys = Ring(layout, True, None, kept=True)
    kv = torch.ones(SHARE, 1, WIDTH, dtype=dtype)
    own = [numbers(step) for step in range(CP_SIZE)]
    arriving = [numbers(10 + step) for step in range(CP_SIZE - 1)]

    # What is sent: two latents, a gradient, a latent, and the gradients of the last two blocks.
    post.to_come = [kv, kv, arriving[0], kv, arriving[1], arriving[2]]
    blocks = iter(own)
    shown = keys.gradient(kv, lambda block: next(blocks).clone())
    assert shown.dtype == dtype and not shown.any(), "autograd is told of it later"
    total = keys.finish_gradient()

    passed_on = [post.sent[number] for number in (2, 4, 5)]
    expected = [own[1], own[2] + arriving[0], own[3] + arriving[1]]
    for found, wanted in zip(passed_on, expected):
        assert found.dtype == torch.float32 and torch.equal(found, wanted)
    assert total.dtype == torch.float32
    assert torch.equal(total, own[0] + arriving[2])


class Group:
    """Ranks of a job that are neither its first nor in a row."""

    GLOBAL = (1, 3, 5, 7)

    def size(self) -> int:
        return len(self.GLOBAL)


@pytest.mark.parametrize(("rank", "to", "source"), [(0, 3, 7), (1, 5, 1), (3, 1, 5)])
def test_neighbours_are_global_ranks(monkeypatch, rank, to, source):
    """torch.distributed counts those of the job, the layout those of the group."""
    group, asked = Group(), []

    def send_and_receive(operations):
        asked.extend(operations)
        return [Over() for _ in operations]

    monkeypatch.setattr(ring.dist, "get_global_rank", lambda of, rank: of.GLOBAL[rank])
    monkeypatch.setattr(ring.dist, "P2POp", lambda op, x, peer, group: (op, x, peer, group))
    monkeypatch.setattr(ring.dist, "batch_isend_irecv", send_and_receive)
    x = torch.ones(2, 3)
    transfer = Transfer(x, group, rank)
    found = {op: (tensor, peer, of) for op, tensor, peer, of in asked}
    assert len(asked) == 2
    assert found[ring.dist.isend][0] is x
    assert found[ring.dist.isend][1:] == (to, group)
    assert found[ring.dist.irecv][0] is transfer.received()
    assert found[ring.dist.irecv][1:] == (source, group)
