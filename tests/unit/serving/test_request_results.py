"""Requests that cannot run, end early or are aborted: each has a clear end, the others no harm."""

from types import SimpleNamespace

import pytest

from absorbed_mla.serving.engine import Engine
from absorbed_mla.serving.engine_options import EngineOptions
from absorbed_mla.serving.request_results import last_of, progress_of, result_of
from absorbed_mla.serving.sampling.parameters import SamplingParams
from tests.support.engine import (
    CHUNKED,
    Request,
    Run,
    add,
    assert_generates,
    by_whole_forwards,
    engine_of,
    generate,
    generating_model,
    prompt,
    step_to_the_end,
)
from tests.support.models import VOCAB

GOOD = [Request(prompt(length, seed), 8) for seed, length in enumerate((3, 70, 60))]
# Of 192 and of 128 tokens for a request.
SMALL, SMALLER = {**CHUNKED, "blocks": 3}, {"blocks": 3, "paused_blocks": 1}


@pytest.fixture(scope="module")
def expected(model):
    return by_whole_forwards(model, GOOD)


REFUSED = {
    "empty": ([], {}, "the prompt is empty"),
    "unknown-token": ([3, VOCAB], {}, f"token {VOCAB} is not in the vocabulary of {VOCAB}"),
    "negative-token": ([-1], {}, "token -1 is not in the vocabulary"),
    "too-long": (prompt(256), CHUNKED, "256 tokens and must be shorter than 256"),
    "step": (prompt(200), {}, "the prompt has 200 tokens, a step without chunks 192"),
    "cache": (prompt(190), SMALL, "190 tokens and 50 new ones do not fit into a cache of 192"),
    "paused": (prompt(100), SMALLER, "100 tokens and 50 new ones do not fit into a cache of 128"),
}


@pytest.mark.parametrize(("refused", "options", "error"), REFUSED.values(), ids=REFUSED)
def test_refused(model, expected, refused, options, error):
    """The first and the last of several."""
    request = Request(refused, 50)
    run = generate(engine_of(model, **options), [request, *GOOD, request])
    for result in (run.results.pop(0), run.results.pop()):
        assert error in result.error and not result.tokens
    assert_generates(run, expected)


def test_room_for_drafts_beyond_the_last_token():
    """Without it, the last step would wait for a block for ever."""
    model = generating_model(num_layers=1, mtp_num_layers=2)
    engine = engine_of(model, blocks=1, max_sequence_length=64, num_speculative_tokens=2)
    fits, not_quite = Request(prompt(54), 9), Request(prompt(54), 10)
    found = generate(engine, [fits, not_quite]).results
    assert_generates(Run(found[:1], engine.statistics), by_whole_forwards(model, [fits]))
    assert "10 new ones, and 1 more for drafts, do not fit into a cache of 64" in found[1].error
    # What is enough by default is enough for these, too.
    options = EngineOptions(max_sequence_length=64, max_requests=1, num_speculative_tokens=2)
    run = generate(Engine(model, options), [not_quite])
    assert_generates(run, by_whole_forwards(model, [not_quite]))


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs needs an engine with prompt_logprobs=True"),
        ({"n": 2}, "n is for LLM, which knows the text"),
        ({"stop": "x"}, "stop is for LLM"),
        ({"bad_words": ["x"]}, "bad_words with texts is for LLM"),
        ({"truncate_prompt_tokens": 1}, "truncate_prompt_tokens is for LLM"),
    ],
)
def test_what_this_engine_has_not(model, asked, error):
    [result] = engine_of(model).generate([[1]], SamplingParams(**asked))
    assert error in result.error


def test_refused_by_megatron(model, expected, monkeypatch):
    """What only the host refuses has an end as well; its number can be used again."""
    monkeypatch.setattr(EngineOptions, "why_not", lambda *args: "")
    with engine_of(model) as engine:
        [alone] = generate(engine, [Request(prompt(300), 5)]).results
        assert not engine.host.requests
        run = generate(engine, [*GOOD, Request(prompt(200), 5)])
    assert alone.error == "MaxSequenceLengthOverflowError, TokenOverflowError"
    assert run.results.pop().error == "TokenOverflowError"
    assert_generates(run, expected)


@pytest.mark.parametrize("unused", [(), (VOCAB - 1,)])
@pytest.mark.parametrize("index", [0, 4, 7])
def test_stop_token(model, expected, index, unused):
    """Also one that is not the first of several."""
    tokens = expected[1].tokens
    assert not set(unused) & set(tokens)
    stopping = GOOD[1].sampling().replace(stop_token_ids=(*unused, tokens[index]))
    results = engine_of(model).generate(
        [request.prompt for request in GOOD], [GOOD[0].sampling(), stopping, GOOD[2].sampling()]
    )
    cut = tokens[: tokens.index(tokens[index]) + 1]
    assert [one.tokens for one in results] == [expected[0].tokens, cut, expected[2].tokens]
    assert [one.finish for one in results] == ["length", "stop", "length"]


@pytest.mark.parametrize(
    ("length", "options", "max_tokens", "num_tokens"),
    [
        (190, SMALL, None, 2),
        (100, SMALLER, None, 28),
        (250, CHUNKED, None, 6),
        (250, CHUNKED, 50, 6),
    ],
    ids=["cache", "paused", "context", "context-is-less"],
)
def test_as_many_as_fit(model, length, options, max_tokens, num_tokens):
    """The rest of the context; without ``max_tokens`` that of the cache if it is less."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0)
    [result] = engine_of(model, **options).generate([prompt(length)], sampling)
    assert (result.error, result.finish) == ("", "context")
    [expected] = by_whole_forwards(model, [Request(prompt(length), num_tokens)])
    assert result.tokens == expected.tokens


def test_a_prompt_that_fills_the_cache(model):
    sampling = SamplingParams(max_tokens=None)
    [result] = engine_of(model, **CHUNKED, blocks=3).generate([prompt(192)], sampling)
    assert "192 tokens and 1 new ones do not fit into a cache of 192" in result.error


class TestAbort:
    """Megatron has no such call: what runs ends as at a stop word, what waits leaves the queue."""

    @pytest.mark.parametrize(
        ("number", "after_steps", "num_tokens", "options"),
        [
            pytest.param(0, 3, 3, {}, id="first-running"),
            pytest.param(1, 3, 3, {}, id="second-running"),
            pytest.param(2, 3, 3, {}, id="third-running"),
            pytest.param(2, 1, 0, {"max_requests": 2}, id="waiting"),
            # As soon as the prompt is in the cache; the host expects the rest of it.
            pytest.param(1, 1, 1, CHUNKED, id="prompt-being-read"),
            pytest.param(0, 0, 0, {}, id="before-it-begins"),
        ],
    )
    def test_one_of_several(self, model, expected, number, after_steps, num_tokens, options):
        results = self.run(model, expected, number, after_steps, **options)
        aborted = results.pop(number)
        assert (aborted.finish, aborted.error) == ("abort", "")
        assert aborted.tokens == expected[number].tokens[:num_tokens]
        rest = [result.tokens for other, result in enumerate(expected) if other != number]
        assert [result.tokens for result in results] == rest

    def test_after_its_end(self, model, expected):
        results = self.run(model, expected, 0, 8)
        assert [result.tokens for result in results] == [result.tokens for result in expected]
        assert results[0].finish == "length"

    def test_whose_result_was_taken(self, model):
        """Megatron would finish every later step of the scheduler for one that it looks for."""
        with engine_of(model) as engine:
            add(engine, GOOD)
            for _ in range(2):
                engine.step()
            engine.abort(0)
            while engine.is_busy():
                for one in engine.step():
                    if one.result is not None:
                        engine.results.pop(one.number)
            engine.abort(1)  # has ended
            [last] = add(engine, GOOD[:1])
            engine.step()
            assert not engine.host.stop_word_finished_request_ids
            step_to_the_end(engine)
            assert engine.results[last].finish == "length"

    def run(self, model, expected, number, after_steps, **options):
        """Results of GOOD while request ``number`` is aborted after some steps."""
        with engine_of(model, **options) as engine:
            add(engine, GOOD)
            for _ in range(after_steps):
                engine.step()
            engine.abort(number)
            results = step_to_the_end(engine)
            engine.require_no_leak()
            assert not engine.host.requests
            # While there are any, Megatron finishes every step of the overlap scheduler.
            assert not engine.host.stop_word_finished_request_ids
            # A later request with its number is another one.
            assert_generates(generate(engine, GOOD), expected)
        return results


def test_scheduler_that_waits_for_ever(model):
    """Says so, where a loop over the host's steps would not end."""
    engine = engine_of(model)
    engine.host.schedule_waiting_requests = lambda: None
    with pytest.raises(RuntimeError, match="schedules none of 3 waiting requests"):
        generate(engine, GOOD)


# What is taken from Megatron's lists of a request whose parts began at evictions.


def part(length: int, generated: list[int], top: list, prompt_top: list | None = None):
    """A part of a request; its entries are named by numbers."""
    return SimpleNamespace(
        prompt_tokens=[0] * length,
        generated_tokens=generated,
        generated_log_probs=[float(-token) for token in generated],
        generated_top_n_logprobs=[{str(token): 0.0} for token in top],
        prompt_log_probs=None if prompt_top is None else [float(token) for token in prompt_top],
        prompt_top_n_logprobs=prompt_top and [{str(token): 0.0} for token in prompt_top],
        status=None,
    )


class Record(SimpleNamespace):
    def __getitem__(self, index):
        return self.requests[index]


# Read in chunks, whose ends left the entries 90 to 92; the second part generated nothing.
RECORD = Record(requests=[part(4, [1, 2], [90, 1, 2]), part(6, [], [91]), part(6, [3], [92, 3])])


@pytest.mark.parametrize(
    ("count", "tokens", "top"),
    [(0, [], []), (1, [3], [3]), (2, [2, 3], [2, 3]), (3, [1, 2, 3], [1, 2, 3])],
)
def test_last_entries(count, tokens, top):
    assert last_of(RECORD, "generated_tokens", count) == tokens
    found = last_of(RECORD, "generated_top_n_logprobs", count)
    assert found == [{str(token): 0.0} for token in top]
    progress = progress_of(RECORD, 7, count, None)
    assert (progress.number, progress.tokens) == (7, tokens)
    assert progress.top_log_probs == [{token: 0.0} for token in top]
    assert progress.log_probs == [-token for token in tokens]


def test_all_entries():
    result = result_of(RECORD, SamplingParams(logprobs=1), aborted=False)
    assert result.tokens == [1, 2, 3] and result.log_probs == [-1, -2, -3]
    assert result.top_log_probs == [{1: 0.0}, {2: 0.0}, {3: 0.0}]
    assert result.prompt_log_probs == result.prompt_top_log_probs == []


def test_entries_of_a_prompt():
    """Of the first part that has read it to its end; a later one's prompt is longer."""
    record = Record(
        requests=[part(4, [], [], [10]), part(4, [5], [], [10, 11, 12]), part(5, [6], [], [1] * 4)]
    )
    result = result_of(record, SamplingParams(prompt_logprobs=1), aborted=False)
    assert result.prompt_log_probs == [10, 11, 12]
    assert result.prompt_top_log_probs == [{10: 0.0}, {11: 0.0}, {12: 0.0}]
    longer = Record(requests=[part(4, [5], [], [10]), part(5, [6], [], [10, 11, 12, 13])])
    result = result_of(longer, SamplingParams(prompt_logprobs=1), aborted=False)
    assert result.prompt_log_probs == [10, 11, 12]


@pytest.mark.parametrize(
    ("asked", "top", "of_prompt"),
    [
        ({}, 0, False),
        ({"logprobs": 0}, 0, False),
        ({"logprobs": 3}, 3, False),
        ({"prompt_logprobs": 2}, 2, True),
        ({"logprobs": 3, "prompt_logprobs": 2}, 3, True),
        ({"logprobs": 1, "prompt_logprobs": 2}, 2, True),
    ],
)
def test_log_probs_that_megatron_is_asked_for(asked, top, of_prompt):
    host = SamplingParams(**asked).to_host(9)
    assert host.top_n_logprobs == top and host.return_log_probs == bool(asked)
    assert host.skip_prompt_log_probs == (not of_prompt)


@pytest.mark.parametrize(("asked", "room", "found"), [(50, 6, 6), (5, 6, 5), (None, 6, 6)])
def test_length_that_megatron_is_asked_for(asked, room, found):
    assert SamplingParams(max_tokens=asked).to_host(room).num_tokens_to_generate == found
