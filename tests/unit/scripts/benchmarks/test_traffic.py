"""What is counted as sent is what a rank sends."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from benchmarks.kit.traffic import Message, count_traffic
from tests.support import world


def fake_group(rank: int, size: int) -> dist.ProcessGroup:
    """A group whose collectives do nothing, at once."""
    group = dist.ProcessGroup(dist.HashStore(), rank, size)
    make = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
    group._register_backend(
        torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, make(rank, size)
    )
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group


X = torch.ones(8, 3, dtype=torch.bfloat16)  # 48 bytes
PARTS = [*X.chunk(4)]
FOUR = [torch.empty_like(X) for _ in range(4)]
# Name, call of a group of 4 and a rank, bytes that rank 0 and rank 1 send.
CALLS = {
    "all_gather_into_tensor": (
        "all-gather",
        lambda g, r: dist.all_gather_into_tensor(X.new_empty(32, 3), X, group=g),
        (144, 144),
    ),
    "all_gather": ("all-gather", lambda g, r: dist.all_gather(FOUR, X, group=g), (144, 144)),
    "reduce_scatter_tensor": (
        "reduce-scatter",
        lambda g, r: dist.reduce_scatter_tensor(X.new_empty(2, 3), X, group=g),
        (36, 36),
    ),
    "reduce_scatter": (
        "reduce-scatter",
        lambda g, r: dist.reduce_scatter(X.new_empty(2, 3), PARTS, group=g),
        (36, 36),
    ),
    "all_reduce": ("all-reduce", lambda g, r: dist.all_reduce(X, group=g), (72, 72)),
    "all_to_all_single": (
        "all-to-all",
        lambda g, r: dist.all_to_all_single(X.new_empty(8, 3), X, group=g),
        (36, 36),
    ),
    "uneven all_to_all_single": (
        "all-to-all",
        lambda g, r: dist.all_to_all_single(
            X.new_empty(8, 3), X, [2, 2, 2, 2], [5, 1, 1, 1], group=g
        ),
        (18, 42),
    ),
    "all_to_all": (
        "all-to-all",
        lambda g, r: dist.all_to_all([X.new_empty(2, 3)] * 4, PARTS, group=g),
        (36, 36),
    ),
    "broadcast": ("broadcast", lambda g, r: dist.broadcast(X, group_src=0, group=g), (144, 0)),
    "reduce": ("reduce", lambda g, r: dist.reduce(X, group_dst=0, group=g), (0, 48)),
    "gather": (
        "gather",
        lambda g, r: dist.gather(X, None if r else FOUR, group_dst=0, group=g),
        (0, 48),
    ),
    "scatter": (
        "scatter",
        lambda g, r: dist.scatter(X.new_empty(2, 3), None if r else PARTS, group_src=0, group=g),
        (36, 0),
    ),
    "send": ("send", lambda g, r: dist.send(X, group_dst=3, group=g), (48, 48)),
    "isend": ("send", lambda g, r: dist.isend(X, group_dst=3, group=g), (48, 48)),
}


@pytest.mark.parametrize("rank", (0, 1))
@pytest.mark.parametrize("name", CALLS)
def test_bytes_of_every_operation(name, rank):
    operation, call, num_bytes = CALLS[name]
    with count_traffic() as traffic:
        call(fake_group(rank, 4), rank)
    assert traffic.messages == [Message(operation, 4, num_bytes[rank], "bfloat16")]


def test_receiving_sends_nothing():
    with count_traffic() as traffic:
        fake_group(1, 4).recv([X], 0, 0)
    assert traffic.num_bytes == 0


def test_keyword_arguments_count_too():
    group = fake_group(0, 2)
    with count_traffic() as traffic:
        group.allreduce(tensors=[X])
        group.send(tensors=[X], dstRank=1, tag=0)
    assert [message.num_bytes for message in traffic.messages] == [48, 48]


def test_groups_of_one_send_nothing():
    with count_traffic() as traffic:
        dist.all_reduce(X.float().to(world.device()))
        dist.all_reduce(X.float(), group=fake_group(0, 1))
    assert not traffic.messages


def test_counting_is_over_at_the_end_also_after_an_error():
    before = dist.ProcessGroup.allreduce
    with pytest.raises(KeyError), count_traffic() as traffic:
        raise KeyError
    dist.all_reduce(X, group=fake_group(0, 2))
    assert dist.ProcessGroup.allreduce is before and not traffic.messages


def test_counting_nested_and_in_other_threads():
    """Autograd computes gradients on a GPU in a thread of its own."""

    def send():
        dist.all_reduce(X, group=fake_group(0, 2))

    with count_traffic() as whole:
        send()
        with count_traffic() as part:
            thread = threading.Thread(target=send)
            thread.start()
            thread.join()
    assert (whole.num_bytes, part.num_bytes) == (96, 48)


def test_breakdown():
    with count_traffic() as traffic:
        for size, x in ((2, X), (4, X), (2, X), (2, X.float())):
            dist.all_reduce(x, group=fake_group(0, size))
    rows = [tuple(row.values()) for row in traffic.breakdown()]
    assert rows == [
        ("all-reduce", 2, "bfloat16", 2, 96),
        ("all-reduce", 4, "bfloat16", 1, 72),
        ("all-reduce", 2, "float32", 1, 96),
    ]
