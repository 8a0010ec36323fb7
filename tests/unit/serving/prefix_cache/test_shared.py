"""A prefix of several requests is held once, and survives the eviction of those that use it."""

import pytest
import torch

from tests.support.engine import (
    CHUNKED,
    KEPT,
    Request,
    Run,
    add,
    assert_generates,
    by_whole_forwards,
    engine_of,
    generate,
    prompt,
)

# Two blocks of all of them, and a third of each one's own.
REQUESTS = [Request(prompt(140, seed, shared=130), 12) for seed in range(4)]
# One block of both.
PAIR = [Request(prompt(120, seed, shared=70), 90) for seed in range(2)]
WAYS = {
    "overlap": {},
    "megatron": {"decode_loop": False},
    "chunks": CHUNKED,
    "whole-chunks": {"chunked_prefill": True},
    "drafts": {"num_speculative_tokens": 2},
    "until-their-ends": {"inference_config": {}},
}


@pytest.fixture(scope="module")
def expected(model, drafting):
    """Of either model, by its number of layers that draft."""
    return {one: by_whole_forwards(one, REQUESTS) for one in (model, drafting)}


@pytest.fixture(scope="module")
def alone(model):
    """The two, each with blocks of its own."""
    return generate(engine_of(model), PAIR, log_probs=True).results


def used(engine) -> list[int]:
    """Blocks that requests hold."""
    return (
        (engine.host.context.kv_block_allocator.block_ref_counts > 0).nonzero().flatten().tolist()
    )


@pytest.mark.parametrize("first", [4, 1], ids=["together", "later"])
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_held_once(model, drafting, expected, options, first):
    of = drafting if "num_speculative_tokens" in options else model
    with engine_of(of, **KEPT | options) as engine:
        add(engine, REQUESTS[:first])
        engine.step()
        add(engine, REQUESTS[first:])
        most = 0
        while engine.is_busy():
            most = max(most, len(used(engine)))
            engine.step()
        assert engine.host.context.lifetime_prefill_token_count == 140 + 3 * 12
        assert most == 2 + 4 and engine.statistics.most_rows == 4
        results = [engine.results[number] for number in range(4)]
    assert [one.tokens for one in results] == [one.tokens for one in expected[of]]


@pytest.mark.parametrize("options", [{}, {"decode_loop": False}], ids=["overlap", "megatron"])
def test_eviction(model, alone, options):
    """Two requests need a fourth block at once, and there is one.

    The one that is evicted leaves its second block to the prefix cache, half of it generated, and
    finds it again behind the shared one, which the other goes on to read. Its third block was not
    known to be right, when the step that filled it took it away.
    """
    with engine_of(model, blocks=6, **KEPT | options) as engine:
        allocator, memory = (
            engine.host.context.kv_block_allocator,
            engine.host.context.memory_buffer,
        )
        add(engine, PAIR, log_probs=True)
        engine.step()
        [shared] = allocator.kv_hash_to_block_id.values()
        latents = memory[:, shared].clone()
        while engine.is_busy():
            engine.step()
            assert shared in allocator.kv_hash_to_block_id.values()
            assert torch.equal(memory[:, shared], latents)
        results = [engine.results[number] for number in range(2)]
        assert (engine.statistics.evicted, engine.statistics.prefix_blocks) == (1, 1 + 2)
        assert engine.host.context.lifetime_prefill_token_count == 120 + 56 + 65
        engine.require_no_leak()
    assert_generates(Run(results, engine.statistics), alone)
