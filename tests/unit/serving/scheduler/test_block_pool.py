"""The check for lost blocks, which the tests of the engine rely on, and blocks that are evicted."""

from types import SimpleNamespace

import pytest
from megatron.core.inference.config import PrefixCachingEvictionPolicy
from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator

from absorbed_mla.serving.scheduler.cached_blocks import require_chains
from absorbed_mla.serving.scheduler.free_blocks import evict_blocks_together
from tests.support.engine import (
    CHUNKED,
    KEPT,
    Request,
    engine_of,
    generate,
    generating_model,
    prompt,
)


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
    engine = engine_of(generating_model(num_layers=1), blocks=12, prefix_caching=damage is refer)
    engine.require_no_leak()
    damage(engine.host.context.kv_block_allocator)
    with pytest.raises(RuntimeError, match=error):
        engine.require_no_leak()


@pytest.mark.parametrize(("lacking", "evicted"), [(1, 10), (10, 10), (11, 11), (640, 640)])
def test_blocks_are_evicted_together(lacking, evicted):
    """A sixty-fourth of them at least, and no more than there are; the oldest first."""
    clock = SimpleNamespace(prefix_cache_lru_clock=0)
    policy = PrefixCachingEvictionPolicy.LRU
    allocator = KVBlockAllocator(clock, 641, 0, True, policy)
    evict_blocks_together(allocator)
    for clock.prefix_cache_lru_clock in range(640):
        blocks = allocator.allocate_memory_blocks(1).clone()
        allocator.register_kv_block_hashes(blocks.tolist(), [1 + clock.prefix_cache_lru_clock])
        allocator.release_memory_blocks(blocks)
    assert not allocator.total_avail
    assert len(allocator.allocate_memory_blocks(lacking)) == lacking
    assert allocator.total_avail == evicted - lacking
    assert sorted(allocator.kv_hash_to_block_id) == list(range(1 + evicted, 641))
    assert not allocator.evict_lru_blocks(641)


@pytest.mark.parametrize("start", range(70, 76))
def test_text_that_another_has_cached_meanwhile(start):
    """A prompt read in chunks completes blocks that a request with the same text has cached.

    That ends between two chunks, or before or behind them. Whatever is evicted then, what is cached
    stays behind cached blocks.
    """
    model, first = generating_model(num_layers=1), Request(prompt(60), 75)
    with engine_of(model, blocks=9, max_requests=2, **KEPT | CHUNKED) as engine:
        [answer] = generate(engine, [first]).tokens
        later = Request([*first.prompt, *answer[:70], *prompt(60, 3)], 3)
        engine.stop()
        engine.start()
        engine.add_request(first.prompt, first.sampling())
        for _ in range(start):
            engine.step()
        engine.add_request(later.prompt, later.sampling())
        while engine.is_busy():
            engine.step()
            require_chains(engine.host.context.kv_block_allocator)
        for length in (64, 250, 190):
            generate(engine, [Request(prompt(length, 4), 2), later])
            engine.require_no_leak()


def test_every_cached_block_can_be_evicted():
    """Also the parent of one that a prompt has found there, but computes again in two chunks."""
    engine = engine_of(generating_model(num_layers=1), blocks=4, max_requests=2, **CHUNKED, **KEPT)
    # Two whole blocks; the last one is computed, or there would be no logits. Beside the other
    # prompt, there is room for 24 of its tokens.
    twice, other = Request(prompt(128, 1), 1), Request(prompt(40, 2), 4)
    with engine:
        generate(engine, [twice])
        assert generate(engine, [other, twice]).statistics.chunks
        # It needs every block.
        generate(engine, [Request(prompt(250, 3), 2)])
