"""Requests that crowd an engine over ranks, and the tokens of one process."""

from collections.abc import Sequence

import pytest

from absorbed_mla.serving.request_results import Result
from absorbed_mla.serving.statistics import Statistics
from tests.support import world
from tests.support.engine import (
    Request,
    Run,
    check_generates,
    engine_of,
    generate,
    generating_model,
    prompt,
)

# They share a block, and cross the end of another together.
PROMPTS = [prompt(124, seed, shared=70) for seed in range(6)]
# As those; and some that end at and around the end of a block, or leave ranks without a token.
REQUESTS = [
    *(Request(prompt(126, seed, shared=70), 5) for seed in range(4)),
    *(Request(prompt(length, length), 4) for length in (1, 2, 63, 64, 65)),
]
# Chunks, shared prefixes and a cache that is too small.
CROWDED = {
    "step_tokens": 64,
    "chunked_prefill": True,
    "prefix_caching": True,
    "blocks": 7,
    "paused_blocks": 1,
}
_FOUND: dict[str, Run] = {}


def alone(options=None, **fields) -> Run:
    """What one process generates for ``REQUESTS``, with nothing but whole prompts."""
    key = repr((options, fields))
    if key not in _FOUND:
        with world.parallel(tp=1):
            engine = engine_of(generating_model(options, **fields))
            _FOUND[key] = generate(engine, REQUESTS, log_probs=True)
    return _FOUND[key]


def assert_same(found: Sequence[Result], expected: Sequence[Result], within: float = 5e-5) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert not one.error, one.error
        assert one.tokens == other.tokens, number
        assert one.finish == other.finish
        assert one.log_probs == pytest.approx(other.log_probs, abs=within)
        assert one.prompt_log_probs == pytest.approx(other.prompt_log_probs, abs=within)


def assert_crowded(done: Statistics) -> None:
    assert done.chunks and done.prefix_blocks and done.evicted + done.most_paused


def check_crowded(model) -> Statistics:
    """The tokens are those of whole forwards, in steps of the sizes of graphs, too."""
    requests = [Request(text, 8) for text in PROMPTS]
    run = check_generates(model, requests, **CROWDED, num_cuda_graphs=4)
    assert_crowded(run.statistics)
    return run.statistics
