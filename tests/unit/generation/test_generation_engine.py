"""Megatron's engine around a live model: every request gets its end, and the model goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from megatron.core.inference.utils import InferenceMode

from absorbed_mla.testing.engine import require_no_leak
from tests.support import world
from tests.support.generation import by_forwards, prompts_of
from tests.support.models import gpt_model

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))

from generation.engine import GenerationEngine
from generation.sampling import Sampling

GREEDY = Sampling(num_tokens=6, top_k=1)


@pytest.fixture
def model():
    # Wide enough that tokens depend on their context.
    return gpt_model(cache_mla_latents=True, num_layers=2, init_method_std=0.4)


def engine_of(model, **changes) -> GenerationEngine:
    return GenerationEngine(model, **{"max_sequence_length": 256, "max_requests": 4, **changes})


def tokens_of(results) -> list[list[int]]:
    return [result.tokens for result in results]


def test_tokens_are_those_of_whole_forwards(model):
    prompts = prompts_of((3, 70, 130, 17, 64, 5))
    expected = by_forwards(model.eval(), prompts, 6)
    engine = engine_of(model, step_tokens=64)
    results = engine.generate(prompts, Sampling(num_tokens=6, top_k=1, log_probs=True))
    assert tokens_of(results) == tokens_of(expected)
    found, wanted = (torch.tensor([r.log_probs for r in x]) for x in (results, expected))
    assert torch.allclose(found, wanted, atol=1e-5)
    assert {result.finish for result in results} == {"length"}
    require_no_leak(engine.host)


def test_progress_tells_every_token_once(model):
    told, ends = {0: [], 1: [], 2: []}, []

    def progress(number, new, end):
        told[number] += new
        if end is not None:
            ends.append((number, end))

    prompts = [*prompts_of((3, 70)), []]
    samplings = [Sampling(num_tokens=n, top_k=1) for n in (9, 2, 1)]
    results = engine_of(model).generate(prompts, samplings, progress)
    assert list(told.values()) == tokens_of(results)
    assert sorted(number for number, _ in ends) == [0, 1, 2]
    assert all(results[number] is end for number, end in ends)
    assert [len(tokens) for tokens in told.values()] == [9, 2, 0]


@pytest.mark.parametrize(
    "prompt, sampling, changes, error",
    [
        ([], GREEDY, {}, "prompt is empty"),
        ([3, 64], GREEDY, {}, "token 64 is not in the vocabulary of 64"),
        ([-1], GREEDY, {}, "token -1"),
        ([1] * 256, GREEDY, {}, "256 tokens and must be shorter than 256"),
        ([1] * 100, GREEDY, {"chunked_prefill": False, "step_tokens": 64}, "without chunks 64"),
        ([1] * 125, GREEDY, {"cache_tokens": 130}, "do not fit into a cache of 128"),
        ([1], Sampling(num_tokens=1, top_k=64), {}, "top_k must be below"),
    ],
)
def test_faults_are_the_requests_own(model, prompt, sampling, changes, error):
    engine = engine_of(model, **changes)
    others = prompts_of((3, 17))
    alone = engine.generate(others, GREEDY)
    first, bad, last = engine.generate([others[0], prompt, others[1]], [GREEDY, sampling, GREEDY])
    assert error in bad.error
    assert not bad.tokens
    assert [first, last] == alone
    assert {first.error, last.error} == {""}


def test_a_full_cache_only_delays(model):
    prompts = prompts_of((60, 60, 60, 60))
    sampling = Sampling(num_tokens=70, top_k=1)
    expected = engine_of(model).generate(prompts, sampling)
    small, told = engine_of(model, cache_tokens=6 * 64), [[] for _ in prompts]
    found = small.generate(prompts, sampling, lambda number, new, end: told[number].extend(new))
    assert found == expected
    assert told == tokens_of(expected)
    assert small.host.evicted_request_count
    require_no_leak(small.host)


def test_ends(model):
    [prompt] = prompts_of((250,))
    engine = engine_of(model)
    [whole] = engine.generate([prompt], Sampling(num_tokens=100, top_k=1))
    assert (whole.finish, len(whole.tokens)) == ("context", 6)
    [stopped] = engine.generate(
        [prompt], Sampling(num_tokens=100, top_k=1, stop_token=whole.tokens[2])
    )
    assert stopped.finish == "stop"
    assert stopped.tokens == whole.tokens[: whole.tokens.index(whole.tokens[2]) + 1]


def test_seeds(model):
    prompts, sampling = prompts_of((3, 17)), Sampling(num_tokens=20, temperature=2.0)
    engine = engine_of(model, seed=5)
    first, second = (tokens_of(engine.generate(prompts, sampling)) for _ in range(2))
    engine.reseed(5)
    assert tokens_of(engine.generate(prompts, sampling)) == first != second
    assert tokens_of(engine_of(model, seed=5).generate(prompts, sampling)) == first
    assert tokens_of(engine_of(model, seed=6).generate(prompts, sampling)) != first


def test_padding_of_the_vocabulary_is_not_generated(model):
    # The logits of the last four rows are the largest, by far.
    with torch.no_grad():
        model.output_layer.weight[60:] *= 100
    prompts = prompts_of((3, 17, 5))
    [loose, tight] = (
        tokens_of(engine_of(model, vocab_size=size).generate(prompts, GREEDY)) for size in (64, 60)
    )
    assert max(map(max, loose)) >= 60 > max(map(max, tight))


def test_equal_beginnings_are_computed_once(model):
    [prompt] = prompts_of((130,))
    engines = [engine_of(model, prefix_caching=on) for on in (True, False)]
    results = [engine.generate([prompt] * 3, GREEDY) for engine in engines]
    assert results[0] == results[1]
    assert [engine.host._prefix_cache_blocks_matched for engine in engines] == [4, 0]


def test_changed_weights_are_seen(model):
    """A prefix that was cached before is not used."""
    prompts, engine = prompts_of((130,)), engine_of(model)
    sampling = Sampling(num_tokens=6, top_k=1, log_probs=True)
    before = engine.generate(prompts, sampling)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    after = engine.generate(prompts, sampling)
    assert after != before
    assert after == engine_of(model).generate(prompts, sampling)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_goes_on(model, training):
    model.train(training)
    engine = engine_of(model)
    assert not InferenceMode.is_active()
    expected = engine.generate(prompts_of((3,)), GREEDY)

    def interrupt(number, new, end):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts_of((3, 70)), GREEDY, interrupt)
    assert model.training is training
    assert not InferenceMode.is_active()
    # What was left of the interrupted requests is gone.
    assert engine.generate(prompts_of((3,)), GREEDY) == expected
    tokens = torch.arange(16, device=world.device())[None]
    model(tokens, tokens, None, labels=tokens).sum().backward()


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"max_sequence_length": 1}, "max_sequence_length must be at least 2"),
        ({"max_requests": 0}, "max_requests at least 1"),
        ({"cache_tokens": 63}, "cache_tokens must be at least 64, got 63"),
    ],
)
def test_refused_arguments(model, changes, error):
    with pytest.raises(ValueError, match=error):
        engine_of(model, **changes)


def test_a_model_without_a_latent_cache_is_refused():
    with pytest.raises(ValueError, match="cache_mla_latents=True"):
        engine_of(gpt_model(num_layers=1))


@pytest.mark.parametrize(
    "fields, error",
    [
        ({"num_tokens": 0}, "num_tokens must be at least 1, got 0"),
        ({"num_tokens": -5}, "num_tokens must be at least 1, got -5"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": float("nan")}, "temperature must be above 0"),
        ({"top_k": -1}, "top_k must be at least 0"),
        ({"top_p": 1.5}, "top_p must be from 0 to 1"),
        ({"top_k": 2, "top_p": 0.5}, "exclude each other"),
    ],
)
def test_refused_sampling(fields, error):
    with pytest.raises(ValueError, match=error):
        Sampling(**{"num_tokens": 1, **fields})
