"""The check for lost blocks, which the tests of the engine rely on, and blocks that are evicted."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.inference.config import PrefixCachingEvictionPolicy
from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator

from absorbed_mla.serving.scheduler.cached_blocks import correct_prefix_cache, require_chains
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


@pytest.fixture
def chain():
    """An allocator whose blocks 1, 2 and 3 are cached, one behind the other, by hashes 11 to 13."""
    clock = SimpleNamespace(prefix_cache_lru_clock=0)
    allocator = KVBlockAllocator(clock, 9, 0, True, PrefixCachingEvictionPolicy.LRU)
    rows = torch.tensor([[8, 8], [1, 2]])
    context = SimpleNamespace(
        kv_block_allocator=allocator, request_to_kv_block_ids=rows, total_request_count=1
    )
    context._find_kv_match_count = lambda request, start, end: ([3], 13)
    correct_prefix_cache(context)
    allocator.register_kv_block_hashes([1, 2, 3], [11, 12, 13], [0, 11, 12])
    return context


def test_no_block_without_the_one_before_it(chain):
    allocator = chain.kv_block_allocator
    allocator.register_kv_block_hashes([4, 5, 6, 7], [12, 15, 16, 14], [11, 99, 15, 13])
    assert allocator.kv_hash_to_block_id == {11: 1, 12: 2, 13: 3, 14: 7}
    require_chains(allocator)
    allocator.block_hashes[2] = -1
    with pytest.raises(RuntimeError, match=r"^blocks \[2, 3\] of the prefix cache are lost"):
        require_chains(allocator)


@pytest.mark.parametrize(
    ("used", "count"), [((), 3), ((1,), 2), ((3,), 0), ((2,), 1), ((1, 2), 1), ((8,), 3)]
)
def test_blocks_before_one_in_use_stay(chain, used, count):
    allocator = chain.kv_block_allocator
    evict_blocks_together(allocator)
    allocator.block_ref_counts[list(used)] = 1
    allocator.total_avail = 0
    assert allocator.get_evictable_block_count() == count
    assert not allocator.is_memory_available(count + 1)
    assert allocator.allocate_memory_blocks(count + 1) is None
    assert not count or len(allocator.allocate_memory_blocks(count)) == count


@pytest.mark.parametrize(("own", "found"), [([1, 2], [3]), ([1, 5], []), ([5, 2], [3])])
def test_what_a_chunk_finds_is_behind_its_own_blocks(chain, own, found):
    chain.request_to_kv_block_ids[1] = torch.tensor(own)
    request = SimpleNamespace(precomputed_block_hashes=[11, 12, 13])
    assert chain._find_kv_match_count(request, 2, 3)[0] == found
    assert chain._find_kv_match_count(request, 0, 3)[0] == [3]


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
