"""Requests that the engine cannot run: each has a clear end, and the others their tokens."""

from __future__ import annotations

import pytest

from absorbed_mla.testing.engine import (
    EngineDriver,
    Request,
    dynamic_engine,
    generate,
    require_no_leak,
)
from tests.support.engine import assert_generates, by_whole_forwards, generating_model, prompt
from tests.support.models import VOCAB

SIZES = {"blocks": 12, "max_sequence_length": 256, "max_requests": 8, "max_tokens": 192}
GOOD = [Request(prompt(length, seed), 8) for seed, length in enumerate((3, 70, 60))]
CHUNKED = {"enable_chunked_prefill": True, "max_tokens": 64}


@pytest.fixture(scope="module")
def model():
    return generating_model()


@pytest.fixture(scope="module")
def expected(model):
    return by_whole_forwards(model, GOOD)


@pytest.mark.parametrize(
    ("request_", "config", "error"),
    [
        pytest.param(
            Request(prompt(300), 5), CHUNKED, "MaxSequenceLengthOverflowError", id="too-long"
        ),
        pytest.param(
            Request(prompt(190), 50),
            {**CHUNKED, "blocks": 3},
            "BlockOverflowError",
            id="longer-than-the-cache",
        ),
        pytest.param(Request(prompt(200), 5), {}, "TokenOverflowError", id="longer-than-a-step"),
        pytest.param(Request([], 5), {}, "the prompt is empty", id="empty"),
        pytest.param(Request([1], 0), {}, "num_tokens must be at least 1, got 0", id="no-tokens"),
        pytest.param(
            Request([1, VOCAB], 5),
            {},
            f"tokens [{VOCAB}] are not in the vocabulary",
            id="unknown-token",
        ),
    ],
)
@pytest.mark.parametrize("place", [0, 3], ids=["first", "last"])
def test_refused(model, expected, request_, config, error, place):
    requests = list(GOOD)
    requests.insert(place, request_)
    with dynamic_engine(model, **{**SIZES, **config}) as engine:
        run = generate(engine, requests)
        require_no_leak(engine)
    refused = run.results.pop(place)
    assert (refused.tokens, refused.error) == ([], error)
    assert_generates(run, expected)


def test_nothing_but_refused_requests(model):
    with dynamic_engine(model, **SIZES) as engine:
        run = generate(engine, [Request(prompt(300), 5), Request([], 5)])
        assert [bool(result.error) for result in run.results] == [True, True]
        # The host forgets them, and their numbers can be used again.
        assert not engine.requests


def test_the_end_of_the_sequence(model):
    """More tokens than the engine's maximum are cut, not refused."""
    request = Request(prompt(250), 50)
    with dynamic_engine(model, **{**SIZES, **CHUNKED}) as engine:
        run = generate(engine, [request])
        require_no_leak(engine)
    assert_generates(run, by_whole_forwards(model, [Request(request.prompt, 6)]))


def test_stop_token(model, expected):
    stop = expected[1].tokens[4]
    assert stop not in expected[1].tokens[:4]
    requests = [GOOD[0], Request(GOOD[1].prompt, 8, stop_token=stop), GOOD[2]]
    with dynamic_engine(model, **SIZES) as engine:
        run = generate(engine, requests)
        require_no_leak(engine)
    assert run.tokens == [expected[0].tokens, expected[1].tokens[:5], expected[2].tokens]


def test_full_cache(model):
    """Requests wait for blocks; with two blocks each, four of them are never there together."""
    requests = [Request(prompt(60, seed), 10) for seed in range(6)]
    with dynamic_engine(model, **{**SIZES, "blocks": 4}) as engine:
        run = generate(engine, requests)
        require_no_leak(engine)
    assert run.most_rows <= 4 and run.evicted
    assert_generates(run, by_whole_forwards(model, requests))


class TestCancelled:
    """Megatron has no such call: what runs ends as at a stop word, what waits leaves the queue."""

    def run(self, model, number, after_steps, **config):
        """Tokens of GOOD while request ``number``, one of them, is cancelled; and its result."""
        with dynamic_engine(model, **{**SIZES, **config}) as engine:
            driver = EngineDriver(engine)
            for request in GOOD:
                driver.add(request)
            for _ in range(after_steps):
                driver.step()
            driver.cancel(number)
            while driver.is_busy():
                driver.step()
            require_no_leak(engine)
            assert not engine.requests
            # A later request with its number is another one.
            assert generate(engine, GOOD).tokens == [
                r.tokens for r in by_whole_forwards(model, GOOD)
            ]
        results = driver.finish().results
        return results.pop(number), results

    def check(self, found, expected, number, num_tokens):
        cancelled, others = found
        assert cancelled.error == "cancelled"
        assert cancelled.tokens == expected[number].tokens[:num_tokens]
        rest = [result for other, result in enumerate(expected) if other != number]
        assert [result.tokens for result in others] == [result.tokens for result in rest]

    @pytest.mark.parametrize("number", range(3))
    def test_while_it_runs(self, model, expected, number):
        self.check(self.run(model, number, 3), expected, number, 3)

    def test_while_it_waits(self, model, expected):
        self.check(self.run(model, 2, 1, max_requests=2), expected, 2, 0)

    def test_while_its_prompt_is_read(self, model, expected):
        """As soon as the prompt is in the cache; the host expects the rest of it."""
        self.check(self.run(model, 1, 1, **CHUNKED), expected, 1, 1)

    def test_before_it_begins(self, model, expected):
        self.check(self.run(model, 0, 0), expected, 0, 0)

    def test_after_its_end(self, model, expected):
        ended, _ = self.run(model, 0, 8)
        assert (ended.tokens, ended.error) == (expected[0].tokens, "")


def test_scheduler_that_waits_for_ever(model):
    """Says so, where a loop over the host's steps would not end."""
    with dynamic_engine(model, **SIZES) as engine:
        engine.schedule_waiting_requests = lambda: None
        with pytest.raises(RuntimeError, match="schedules none of 3 waiting requests"):
            generate(engine, GOOD)


class TestLeak:
    """The check of every other test here."""

    def test_lost_block(self, model):
        with dynamic_engine(model, **SIZES) as engine:
            engine.context.kv_block_allocator.allocate_memory_blocks(1)
            with pytest.raises(RuntimeError, match="of blocks 0 to 11"):
                require_no_leak(engine)

    def test_block_that_is_free_twice(self, model):
        with dynamic_engine(model, **SIZES) as engine:
            allocator = engine.context.kv_block_allocator
            allocator.block_bag[0] = allocator.block_bag[1]
            with pytest.raises(RuntimeError, match="of blocks 0 to 11"):
                require_no_leak(engine)

    def test_reference_without_a_request(self, model):
        with dynamic_engine(model, **SIZES, enable_prefix_caching=True) as engine:
            engine.context.kv_block_allocator.block_ref_counts[3] = 1
            with pytest.raises(RuntimeError, match=r"blocks \[3\] are referred to"):
                require_no_leak(engine)
