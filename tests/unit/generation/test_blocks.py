"""The check for lost blocks, which the tests of the engine rely on."""

from __future__ import annotations

import pytest

from tests.support.engine import engine_of, generating_model


def lose(allocator):
    allocator.allocate_memory_blocks(1)


def free_twice(allocator):
    allocator.block_bag[0] = allocator.block_bag[1]


def refer(allocator):
    allocator.block_ref_counts[3] = 1


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lose, "of blocks 0 to 11"),
        (free_twice, "of blocks 0 to 11"),
        (refer, r"blocks \[3\] are referred to"),
    ],
)
def test_leak(damage, error):
    engine = engine_of(generating_model(), blocks=12, prefix_caching=damage is refer)
    engine.require_no_leak()
    damage(engine.host.context.kv_block_allocator)
    with pytest.raises(RuntimeError, match=error):
        engine.require_no_leak()
