"""Copies ahead of the attention: which are queued when, and that none is read or lost too early."""

import random

import pytest
import torch

from absorbed_mla.inference.kv_offload.blocks import OffloadedBlocks
from absorbed_mla.inference.kv_offload.staging_buffers import NUM_BUFFERS
from absorbed_mla.inference.rows import Rows
from tests.support.copy_streams import RecordedStreams, record

LAYERS, BLOCKS, STAGED = 3, 12, 2
TABLE = torch.arange(BLOCKS)[None]


@pytest.fixture
def streams(monkeypatch) -> RecordedStreams:
    return record(monkeypatch)


@pytest.fixture
def tiers(streams) -> OffloadedBlocks:
    return filled_tiers()


def filled_tiers() -> OffloadedBlocks:
    """12 blocks of a request, 8 of them in host memory: 4 windows of 2 blocks."""
    tiers = OffloadedBlocks(
        layers=LAYERS,
        device_blocks=5,
        host_blocks=10,
        block=(2, 1),
        dtype=torch.float32,
        device=torch.device("cpu"),
        staged=STAGED,
    )
    for block in range(14):
        layers = torch.arange(LAYERS)[:, None, None]
        write_block(tiers, block, 100.0 * layers + block)
    begin(tiers)
    assert [len(window.runs) > 0 for window in tiers.plan.windows] == [True] * 4
    return tiers


def write_block(tiers, block, values) -> None:
    far = tiers.host_block(block)
    (tiers.resident[:, tiers.slots_of([block])[0]] if far is None else far)[:] = values
    tiers.filled([block])


def begin(tiers) -> None:
    """A step that writes to the last block."""
    tiers.begin_step(TABLE, torch.tensor([BLOCKS]), TABLE[0, -1:], torch.tensor([12, 13]), 1)


def rows() -> Rows:
    return Rows.of([1], [2 * BLOCKS], torch.zeros(1, BLOCKS))


def read(tiers, layer, windows=4) -> None:
    """Check the content of a layer's first windows, and leave the generator there."""
    column = 0
    for number, part in enumerate(tiers.parts(layer, rows(), None)):
        for place, block in enumerate(part.rows.block_table[0].tolist()):
            wanted = 100.0 * layer + column + place
            assert torch.equal(part.cache[block], torch.full((2, 1), wanted)), (layer, number)
        column += part.rows.block_table.shape[1]
        if number + 1 == windows:
            break


def test_all_buffers_are_filled_before_the_first_layer(tiers, streams):
    assert streams.copies == list(range(NUM_BUFFERS))


def test_each_window_is_copied_once_and_ahead(tiers, streams):
    """When a window is read, those of the next ones are queued, also of the next layer."""
    for _ in range(3):
        del streams.copies[:], streams.ahead[:]
        begin(tiers)
        for layer in range(LAYERS):
            read(tiers, layer)
        total = LAYERS * 4
        assert len(streams.copies) == total
        assert streams.ahead == [min(n + NUM_BUFFERS, total) for n in range(total)]


def test_several_passes_over_each_layer(tiers, streams):
    """After the first layer they are expected."""
    begin(tiers)
    del streams.copies[:], streams.ahead[:]
    for layer in range(LAYERS):
        read(tiers, layer)
        read(tiers, layer)
    assert len(streams.copies) <= LAYERS * 2 * 4 + 2 * NUM_BUFFERS
    last = streams.ahead[-8:]
    assert last[0] < last[1] < last[2], "copies of the last layer are queued one by one"


def test_copies_after_a_block_was_restored_between_two_passes(tiers, streams):
    """The order goes on from the second pass: nothing is copied that is not read."""
    for layer in (0, 0, 1):
        read(tiers, layer, windows=5)  # to the end
    del streams.copies[:]
    tiers.filled([0])
    for layer in (1, 2, 2):
        read(tiers, layer, windows=5)
    assert len(streams.copies) == 3 * 4


def test_layers_in_any_order(tiers, streams):
    """Also some of them never, or not to their end."""
    choose = random.Random(0)
    for _ in range(40):
        begin(tiers)
        for _ in range(choose.randrange(6)):
            read(tiers, choose.randrange(LAYERS), choose.randrange(1, 5))


@pytest.mark.parametrize("layers_read", [0, 1])
def test_a_restored_block_is_copied_again(layers_read):
    """One that comes from the prefix folder after copies of what was there were made ahead."""
    tiers = filled_tiers()
    block = next(block for block in range(BLOCKS) if tiers.host_block(block) is not None)
    right = tiers.host_block(block).clone()
    tiers.host_block(block)[layers_read:] = -1.0
    begin(tiers)
    for layer in range(layers_read):
        read(tiers, layer)
    tiers.host_block(block)[:] = right
    tiers.filled([block])
    for layer in range(layers_read, LAYERS):
        read(tiers, layer)


def test_a_part_outlives_its_generator(tiers, streams):
    """A reader may take the first part alone, and queue its work then."""
    part = next(tiers.parts(0, rows(), None))
    assert float(part.cache[int(part.rows.block_table[0, 0]), 0]) == 0.0
    streams.read(0)
    for layer in range(LAYERS):
        read(tiers, layer)


def test_steps_never_read_what_they_write_from_host_memory(tiers):
    """Every block of the request in turn is the one that is written to."""
    for block in torch.arange(BLOCKS).tolist():
        tiers.begin_step(
            TABLE, torch.tensor([BLOCKS]), torch.tensor([block]), torch.tensor([12, 13]), 1
        )
        assert tiers.host_block(block) is None
        far = [other for other in range(BLOCKS) if tiers.host_block(other) is not None]
        assert tiers.num_streamed == len(far)
        for layer in range(LAYERS):
            read(tiers, layer)
