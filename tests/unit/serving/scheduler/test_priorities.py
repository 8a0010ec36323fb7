"""``scheduling_policy="priority"``: who begins first, who loses its blocks, and equal answers."""

import pytest

from absorbed_mla.serving.sampling.parameters import SamplingParams
from tests.support.engine import CHUNKED, KEPT, engine_of, prompt

SAMPLED = SamplingParams(max_tokens=20, temperature=1.0, seed=1, logprobs=0)
WAYS = {
    "chunks": CHUNKED,
    "prefix": {**CHUNKED, **KEPT},
    "drafts": {**CHUNKED, "num_speculative_tokens": 1},
    "megatron": {**CHUNKED, "step_tokens": 128, "decode_loop": False},
    "whole": {"step_tokens": 256},
}
# Lengths of prompts, their priorities, blocks of the cache, and who is evicted: prompts of 60 need
# a second block for their fifth token, those of 30 do not.
EVICTIONS = {
    "last": ((60, 60, 60), (0, 1, 2), 4, {2}),
    "first": ((60, 60, 60), (2, 1, 0), 4, {0}),
    "ties": ((60, 60, 60), (1, 1, 1), 4, {2}),
    "needs none": ((30, 60, 60), (5, 0, -3), 4, {0}),
    "two for one": ((30, 60, 30), (1, 0, 2), 3, {2}),
    "all at once": ((60, 60, 60, 60), (3, 0, 1, 2), 5, {0, 3}),
    # One of 59 begins a step before, and has the first row.
    "in front": ((59, 60, 60), (5, 0, 0), 3, {0, 2}),
    "itself": ((60, 30, 30), (1, 0, 0), 3, {0}),
}


def policy(model, drafting, options, **more):
    model = drafting if "num_speculative_tokens" in options else model
    return engine_of(model, **{**options, "scheduling_policy": "priority", **more})


# Each case once, each way with cases that differ.
BOTH = [
    *(("chunks", case) for case in EVICTIONS),
    *(("whole", case) for case in ("all at once", "in front")),
    *(("prefix", case) for case in ("last", "needs none")),
    *(("drafts", case) for case in ("all at once", "needs none")),
    *(("megatron", case) for case in ("first", "two for one")),
]


@pytest.mark.parametrize(("way", "case"), BOTH)
def test_evictions(model, drafting, way, case):
    """The last ones lose their blocks, also if they need no more; nobody's tokens change."""
    lengths, priorities, blocks, expected = EVICTIONS[case]
    options = WAYS[way]
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    engine, evicted = policy(model, drafting, options, blocks=blocks), set()
    with engine:
        for tokens, priority in zip(prompts, priorities):
            engine.add_request(tokens, SAMPLED, priority=priority)
            if len(tokens) == 59:
                engine.step()
        while engine.is_busy():
            engine.step()
            entries = engine.host.requests.items()
            evicted |= {number for number, one in entries if len(one.record.requests) > 1}
        engine.require_no_leak()
        found = [engine.results[number] for number in range(len(prompts))]
    assert evicted == expected
    free = engine_of(engine.model, **options).generate(prompts, SAMPLED)
    for one, other in zip(found, free):
        assert (one.tokens, one.finish, one.error) == (other.tokens, other.finish, "")
        assert one.log_probs == pytest.approx(other.log_probs, abs=5e-5)


# Way, options, length and priority of each request, how many come before the first step, and the
# order in which they end.
FIVE = [(20, priority) for priority in (3, 0, 2, 0, -1)]
EVICTED = [(60, 0), (60, 2), (20, 1)]
ORDERS = {
    "smallest, then by arrival": ("chunks", {"max_requests": 1}, FIVE, 1, [0, 4, 1, 3, 2]),
    "megatron": ("megatron", {"max_requests": 1}, FIVE, 1, [0, 4, 1, 3, 2]),
    "an evicted one waits": (None, {"max_requests": 2, "blocks": 3}, EVICTED, 2, [0, 2, 1]),
    "in chunks": ("chunks", {"max_requests": 1}, [(150, 1), (20, 0)], 1, [0, 1]),
}


@pytest.mark.parametrize(
    ("way", "options", "requests", "early", "expected"), ORDERS.values(), ids=ORDERS
)
def test_who_begins(model, way, options, requests, early, expected):
    """One that runs goes on."""
    engine, ended = policy(model, None, WAYS.get(way, {}), **options), []
    with engine:
        for number, (length, priority) in enumerate(requests):
            engine.add_request(prompt(length, number), SAMPLED, priority=priority)
            if number == early - 1:
                engine.step()
        while engine.is_busy():
            ended += [one.number for one in engine.step() if one.result is not None]
        engine.require_no_leak()
    assert ended == expected and bool(engine.statistics.evicted) == ("blocks" in options)


@pytest.mark.parametrize(
    ("policy", "priority", "message"),
    [
        ("fcfs", 1, "priority needs scheduling_policy='priority', got 'fcfs'"),
        ("priority", 0.5, "priority must be an integer, got 0.5"),
        ("fcfs", 0, ""),
    ],
)
def test_refused(model, policy, priority, message):
    with engine_of(model, scheduling_policy=policy) as engine:
        engine.add_request(prompt(5), SAMPLED.replace(max_tokens=1), priority=priority)
        while engine.is_busy():
            engine.step()
        assert engine.results[0].error == message
