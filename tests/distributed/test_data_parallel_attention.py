"""Whole attention on each rank, other weights divided: the tokens of one process."""

from __future__ import annotations

import functools

import pytest
import torch.distributed as dist
from megatron.core.inference import utils as host_utils

from tests.support import needs, world
from tests.support.divided import divided_model, divided_world
from tests.support.engine import Request, engine_of, generate, generating_model, prompt
from tests.support.models import MIXED

pytestmark = needs.processes(2, 4)

# Some share a block, and cross the end of another together; the others end at and around the end
# of a block.
REQUESTS = [
    *(Request(prompt(122, seed, shared=70), 9) for seed in range(4)),
    *(Request(prompt(length, length), 4) for length in (1, 2, 63, 64, 65)),
]
CROWDED = {
    "step_tokens": 64,
    "chunked_prefill": True,
    "prefix_caching": True,
    "blocks": 7,
    "paused_blocks": 1,
}
MODELS = {
    "dense": {},
    "experts": MIXED,
    "tied": {"share": True},
}


def assert_same(found, expected, numbers):
    assert len(found.results) == len(numbers)
    for number, one in zip(numbers, found.results, strict=True):
        other = expected.results[number]
        assert not one.error, one.error
        assert one.tokens == other.tokens, number
        assert one.log_probs == pytest.approx(other.log_probs, abs=5e-5)


@functools.cache
def alone(name="dense"):
    """What one process generates, with nothing but whole prompts."""
    with world.parallel(tp=1):
        return generate(engine_of(generating_model(**MODELS[name])), REQUESTS, log_probs=True)


def of_rank(numbers, rank=None):
    return [REQUESTS[number] for number in numbers[world.rank() if rank is None else rank]]


# By rank, numbers of requests: equal loads, or one rank with most of them and one without any.
EVEN = [[0, 4, 8], [1, 5], [2, 6], [3, 7]]
UNEVEN = [[0, 1, 2, 3, 4, 5, 6], [], [7], [8]]


@pytest.mark.parametrize("loads", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("name, experts", [("dense", 1), ("experts", 1), ("experts", 2)])
def test_crowded(name, experts, loads):
    """Chunks, shared prefixes and a cache that is too small, on ranks of different loads."""
    with divided_world(experts):
        engine = engine_of(divided_model(**MODELS[name]), **CROWDED)
        numbers = loads[world.rank()]
        found = generate(engine, [REQUESTS[i] for i in numbers], log_probs=True)
    assert_same(found, alone(name), numbers)
    done = found.statistics
    if len(numbers) > 3:
        assert done.chunks and done.prefix_blocks and done.evicted + done.most_paused


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_sizes_of_graphs(name, monkeypatch):
    """All ranks take a graph, for equally many tokens, or none does."""
    fields = {"moe_pad_experts_for_cuda_graph_inference": True} if MODELS[name] else {}
    steps = []
    with divided_world():
        monkeypatch.setattr(host_utils, "moe_layer_cache", None)
        model = divided_model(**MODELS[name], **fields)
        engine = engine_of(model, num_cuda_graphs=4)

        def note(module, inputs, output):
            steps.append((module.exchange.tokens, engine.host.context.using_cuda_graph_this_step()))

        model.embedding.word_embeddings.register_forward_hook(note)
        numbers = UNEVEN[world.rank()]
        found = generate(engine, [REQUESTS[i] for i in numbers], log_probs=True)
    assert_same(found, alone(name), numbers)
    padded = [tokens for tokens, graph in steps if graph]
    assert all(min(tokens) == max(tokens) for tokens in padded)
    assert len(padded) > 4 and len(steps) > len(padded)
    others = [None] * world.size()
    dist.all_gather_object(others, steps)
    assert others == [steps] * world.size()
