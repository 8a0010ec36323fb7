"""Megatron's dynamic engine over tensor-parallel ranks: the tokens of whole forwards."""

from __future__ import annotations

import pytest

from absorbed_mla.testing.engine import Request, dynamic_engine, generate, require_no_leak
from tests.support import world
from tests.support.combinations import few_ranks
from tests.support.engine import assert_generates, by_whole_forwards, generating_model, prompt

pytestmark = few_ranks

SIZES = {"max_sequence_length": 256, "max_requests": 8, "max_tokens": 64}
# They share a block, and cross the end of another together.
REQUESTS = [Request(prompt(120, seed, shared=70), 12) for seed in range(6)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_everything_at_once(sequence_parallel):
    """Chunks, shared prefixes, preemption and the sizes of graphs; every rank schedules alike."""
    model = generating_model(sequence_parallel=sequence_parallel and world.tp_size() > 1)
    config = {
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "num_cuda_graphs": 4,
        "blocks": 9,
        "paused_blocks": 1,
    }
    with dynamic_engine(model, **SIZES, **config) as engine:
        run = generate(engine, REQUESTS, log_probs=True)
        require_no_leak(engine)
    assert_generates(run, by_whole_forwards(model, REQUESTS))
    assert run.chunks and run.prefix_blocks and run.evicted + run.most_paused
    assert run.graph_steps == run.steps
