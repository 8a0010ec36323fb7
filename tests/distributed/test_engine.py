"""Megatron's dynamic engine over tensor-parallel ranks: the tokens of whole forwards."""

import pytest
import torch.distributed as dist

from tests.distributed.engines import CROWDED, PROMPTS, check_crowded
from tests.support import world
from tests.support.combinations import two_ranks
from tests.support.engine import (
    Request,
    assert_generates,
    by_whole_forwards,
    check_generates,
    engine_of,
    generate,
    generating_model,
    prompt,
)

pytestmark = two_ranks


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_everything_at_once(sequence_parallel):
    """Chunks, shared prefixes, preemption and the sizes of graphs; every rank schedules alike."""
    model = generating_model(sequence_parallel=sequence_parallel and world.tp_size() > 1)
    done = check_crowded(model)
    assert done.graph_steps == done.steps


def test_prefix_cache_on_disk(folder):
    """One rank writes, all read what all of them have, and schedule alike."""
    model, requests = generating_model(), [Request(text, 12) for text in PROMPTS[:2]]
    expected = by_whole_forwards(model, requests)
    for disk_blocks in (0, 1):
        engine = engine_of(model, prefix_caching=True, prefix_cache_dir=folder)
        found = generate(engine, requests, log_probs=True)
        engine.close()
        dist.barrier()
        assert_generates(found, expected)
        assert found.statistics.disk_blocks == disk_blocks
    assert len(list(folder.glob("*/*.safetensors"))) == 1


def test_cache_in_host_memory():
    """Ranks move the same blocks at the same time."""
    model = generating_model(sequence_parallel=world.tp_size() > 1)
    requests = [Request(prompt(400, seed), 6) for seed in range(2)]
    sizes = {"max_sequence_length": 448, "max_requests": 2, "blocks": 5, "paused_blocks": 0}
    crowded = {**CROWDED, **sizes, "prefix_caching": False}
    run = check_generates(model, requests, **crowded, host_cache_tokens=12 * 64)
    assert run.statistics.streamed_blocks
