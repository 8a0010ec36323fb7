"""The check for lost blocks, which the tests of the engine rely on, and blocks that are evicted."""

from __future__ import annotations

import pytest
from megatron.core.inference.config import PrefixCachingEvictionPolicy

from tests.support.engine import Request, engine_of, generate, generating_model, prompt


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


def test_every_cached_block_can_be_evicted():
    """Also the parent of one that a prompt has found there, but computes again in two chunks."""
    policy = {"prefix_caching_eviction_policy": PrefixCachingEvictionPolicy.LRU}
    engine = engine_of(
        generating_model(),
        blocks=4,
        step_tokens=64,
        max_requests=2,
        prefix_caching=True,
        chunked_prefill=True,
        inference_config=policy,
    )
    # Two whole blocks; the last one is computed, or there would be no logits. Beside the other
    # prompt, there is room for 24 of its tokens.
    twice, other = Request(prompt(128, 1), 1), Request(prompt(40, 2), 4)
    with engine:
        generate(engine, [twice])
        assert generate(engine, [other, twice]).statistics.chunks
        # It needs every block.
        generate(engine, [Request(prompt(250, 3), 2)])
