"""Megatron's dynamic engine over tensor-parallel ranks: the tokens of whole forwards."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.distributed.whole import shared_folder
from tests.support import world
from tests.support.combinations import few_ranks
from tests.support.engine import (
    Request,
    assert_generates,
    by_whole_forwards,
    engine_of,
    generate,
    generating_model,
    prompt,
)

pytestmark = few_ranks

# They share a block, and cross the end of another together.
REQUESTS = [Request(prompt(120, seed, shared=70), 12) for seed in range(6)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_everything_at_once(sequence_parallel):
    """Chunks, shared prefixes, preemption and the sizes of graphs; every rank schedules alike."""
    model = generating_model(sequence_parallel=sequence_parallel and world.tp_size() > 1)
    engine = engine_of(
        model,
        step_tokens=64,
        chunked_prefill=True,
        prefix_caching=True,
        num_cuda_graphs=4,
        blocks=9,
        paused_blocks=1,
    )
    run = generate(engine, REQUESTS, log_probs=True)
    assert_generates(run, by_whole_forwards(model, REQUESTS))
    done = run.statistics
    assert done.chunks and done.prefix_blocks and done.evicted + done.most_paused
    assert done.graph_steps == done.steps


def test_prefix_cache_on_disk():
    """One rank writes, all read what all of them have, and schedule alike."""
    model = generating_model()
    expected = by_whole_forwards(model, REQUESTS[:2])
    found = []
    with shared_folder() as folder:
        for _ in range(2):
            engine = engine_of(model, prefix_caching=True, prefix_cache_dir=folder)
            found.append(generate(engine, REQUESTS[:2], log_probs=True))
            engine.close()
            dist.barrier()
            assert_generates(found[-1], expected)
        assert [run.statistics.disk_blocks for run in found] == [0, 1]
        assert len(list(folder.glob("*/*.safetensors"))) == 1


def test_cache_in_host_memory():
    """Ranks move the same blocks at the same time."""
    model = generating_model(sequence_parallel=world.tp_size() > 1)
    requests = [Request(prompt(400, seed), 6) for seed in range(2)]
    run = generate(
        engine_of(
            model,
            max_sequence_length=448,
            max_requests=2,
            step_tokens=64,
            chunked_prefill=True,
            blocks=5,
            host_cache_tokens=12 * 64,
        ),
        requests,
        log_probs=True,
    )
    assert_generates(run, by_whole_forwards(model, requests))
    assert run.statistics.streamed_blocks
