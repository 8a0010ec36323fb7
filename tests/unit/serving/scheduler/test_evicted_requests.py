"""A request that was evicted gets what it asked for, as one that was not."""

from dataclasses import asdict

import pytest

from absorbed_mla.serving.sampling.parameters import SamplingParams
from tests.support.engine import CHUNKED, KEPT, engine_of, prompt

# Each needs a second block with its sixth token; there is one.
PROMPTS = [prompt(60, seed) for seed in range(3)]
LENGTH = 20
SAMPLED = SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=1)
WAYS = {
    "chunks": CHUNKED,
    "prefix": {**CHUNKED, **KEPT},
    "drafts": {**CHUNKED, "num_speculative_tokens": 1},
    "megatron": {**CHUNKED, "step_tokens": 128, "decode_loop": False},
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def engines(request, model, drafting):
    """One that has to evict requests, and one that has not."""
    options = {**request.param, "prompt_logprobs": True}
    if "num_speculative_tokens" in options:
        model = drafting
    return [engine_of(model, blocks=blocks, **options) for blocks in (4, 30)]


def run(engines, sampling):
    """The same requests in both engines; results of the first one."""
    small, large = (engine.generate(PROMPTS, sampling) for engine in engines)
    assert engines[0].statistics.evicted and not engines[1].statistics.evicted
    for one, other in zip(small, large):
        assert (one.tokens, one.finish, one.error) == (other.tokens, other.finish, "")
        for name, values in asdict(other).items():
            if "log_probs" in name:
                assert_near(getattr(one, name), values)
    return small


def assert_near(found, expected):
    """Log-probabilities, or those of several tokens, at the same positions."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert one == pytest.approx(other, abs=5e-5)


def test_log_probs(engines):
    for result in run(engines, SAMPLED.replace(logprobs=3)):
        assert len(result.log_probs) == len(result.top_log_probs) == LENGTH
        for token, log_prob, top in zip(result.tokens, result.log_probs, result.top_log_probs):
            assert len(top) == 3 and top.get(token, log_prob) == pytest.approx(log_prob, abs=5e-5)


def test_prompt_log_probs(engines):
    for result in run(engines, SAMPLED.replace(prompt_logprobs=2, logprobs=1)):
        assert len(result.prompt_log_probs) == len(result.prompt_top_log_probs) == 59


def test_changed_logits_and_least_length(engines):
    asked = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.5}
    asked |= {"logit_bias": {3: 2.0}, "bad_words": [[5], [3, 3]]}
    run(engines, SAMPLED.replace(min_tokens=15, stop_token_ids=range(0, 64, 4), **asked))


def test_stop_tokens(engines):
    """Others than the first one, also in the step that takes a request's blocks away."""
    free = engines[1].generate(PROMPTS, SAMPLED)
    used = {token for result in free for token in result.tokens}
    [unused, *_] = sorted(set(range(64)) - used)
    places = (4, 14)
    stops = [(unused, one.tokens[place]) for one, place in zip(free[1:], places, strict=True)]
    stops = [SAMPLED.replace(stop_token_ids=stop) for stop in stops]
    for result, place in zip(run(engines, [SAMPLED, *stops])[1:], places):
        assert result.finish == "stop" and len(result.tokens) <= place + 1
