"""The emulation of a multiprocessor finds what it is there to find."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from tests.support.gluon_machine import (
    Barriers,
    Deadlock,
    Memory,
    Pointer,
    Product,
    Roles,
    TensorMap,
)


@pytest.fixture
def barrier():
    found = Barriers(Roles(0), 1).index(0)
    found.start(1)
    return found


class TestBarrier:
    def test_a_wait_for_nobody(self, barrier):
        with pytest.raises(Deadlock, match=r"roles \[0\] wait for ever"):
            barrier.roles.run([(barrier.wait, (0,)), (lambda: None, ())])

    def test_the_phase_before_the_first_is_over(self, barrier):
        barrier.roles.run([(barrier.wait, (1,))])

    def test_bytes_that_were_announced(self, barrier):
        barrier.change(1, 64)
        assert barrier.phase == 0
        barrier.change(0, -64)
        assert barrier.phase == 1

    def test_too_many_arrivals(self, barrier):
        barrier.change(1, 64)
        with pytest.raises(AssertionError, match="more arrivals"):
            barrier.change(1, 0)

    @pytest.mark.parametrize("waits_for_all", [True, False])
    def test_a_wait_that_an_earlier_phase_could_end(self, waits_for_all):
        """Of a role that has left out a phase; unless another barrier tells that it is over."""
        roles = Roles(0)
        barrier, other = (Barriers(roles, 1).index(0) for _ in range(2))
        barrier.start(1)
        other.start(1)

        def listen():
            roles.pause(lambda: barrier.phase == 2)  # by chance: nobody told it
            if waits_for_all:
                other.wait(0)
            barrier.wait(1)

        def speak():
            barrier.change(1, 0)
            barrier.change(1, 0)
            other.change(1, 0)

        how = contextlib.nullcontext()
        if not waits_for_all:
            how = pytest.raises(AssertionError, match="a wait that two phases end")
        with how:
            roles.run([(speak, ()), (listen, ())])

    @pytest.mark.parametrize("seed", range(5))
    def test_a_message(self, seed):
        roles, seen = Roles(seed), []
        barrier = Barriers(roles, 1).index(0)
        barrier.start(1)

        def listen():
            barrier.wait(0)
            seen.append("heard")

        def speak():
            roles.pause()
            seen.append("said")
            barrier.change(1, 0)

        roles.run([(listen, ()), (speak, ())])
        assert seen == ["said", "heard"]


def test_an_operand_that_changes_while_it_is_multiplied():
    memory = Memory(torch.ones(4, 4))
    product = Product(memory, memory, torch.zeros(4, 4), True)
    memory.data[2, 3] = torch.nan
    with pytest.raises(AssertionError, match="an operand has changed"):
        product.finish()


def test_copies_beyond_the_end_are_zero():
    base = torch.arange(1.0, 13).view(3, 4)
    tensor_map = TensorMap(SimpleNamespace(base=base, block_shape=[2, 4]))
    assert tensor_map.box([2, -1]).tolist() == [[0, 9, 10, 11], [0, 0, 0, 0]]
    assert not tensor_map.box([2**31 - 1, 0]).any()


def test_reads_beyond_the_end():
    with pytest.raises(AssertionError, match="read beyond"):
        (Pointer.to(torch.zeros(4)[2:]) + 2).load()


def test_prefetches_beyond_the_end():
    pointer = Pointer.to(torch.zeros(8)) + torch.tensor([0, 4])
    pointer.prefetch(torch.tensor([32, 16]))
    (pointer + 2**40).prefetch(0)
    with pytest.raises(AssertionError, match="beyond the tensor"):
        pointer.prefetch(32)
    with pytest.raises(AssertionError, match="beyond the tensor"):
        (pointer + -4).prefetch(16)
    with pytest.raises(AssertionError, match="16 bytes"):
        (pointer + 1).prefetch(16)
