"""Requests whose logits are no numbers end with an error; the others of the batch go on.

If these fail, a model with NaN in it writes token 0 until the length, and nobody is told.
"""

import itertools

import pytest
import torch

from absorbed_mla.serving.request_results import NON_FINITE_LOGITS, Failures, Progress, Result
from absorbed_mla.serving.sampling.device_sampler import SampledRequest
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.sampling.sampler import RequestSampler, _Row
from tests.support.combinations import thinned, without
from tests.support.engine import KEPT, engine_of, generating_model, prompt

PROMPTS = [prompt(length, seed) for seed, length in enumerate((5, 9, 7, 12))]
GREEDY = {"max_tokens": 24, "temperature": 0, "logprobs": 1}
# Of the second prompt only.
BAD = next(t for t in PROMPTS[1] if not any(t in one for one in PROMPTS if one is not PROMPTS[1]))
PARAMS = {
    "greedy": SamplingParams(**GREEDY),
    "sampled": SamplingParams(**{**GREEDY, "temperature": 1.0, "top_k": 20, "seed": 3}),
    # The sampler itself draws.
    "penalties": SamplingParams(**GREEDY, frequency_penalty=0.3),
    "stop": SamplingParams(**GREEDY, stop_token_ids=[61, 62, 0]),
}
ENGINES = {
    "loop": {},
    "graphs": {"num_cuda_graphs": 4},
    "megatron": {"decode_loop": False},
    "drafts": {"num_speculative_tokens": 1},
}


def with_nan(model, token: int):
    """The model, in which a token's embedding is NaN."""
    with torch.no_grad():
        model.embedding.word_embeddings.weight[token] = torch.nan
    return model


def run(model, params: SamplingParams, **options) -> list[Result]:
    """Results for all prompts; the blocks of those that have failed are used again."""
    engine = engine_of(model, blocks=6, max_requests=3, **options)
    return engine.generate(PROMPTS, params)


@pytest.mark.parametrize(
    ("engine", "params"),
    [
        *(("loop", params) for params in without(PARAMS, "greedy")),
        *(("graphs", "sampled"), ("megatron", "greedy"), ("drafts", "sampled")),
        *(() if thinned() else (("megatron", "penalties"), ("drafts", "greedy"))),
    ],
)
def test_tokens_until_the_failure(engine, params):
    """A token's embedding is NaN: what reads it fails, with the tokens up to it."""
    drafts = engine == "drafts"
    model = generating_model(num_layers=1, mtp_num_layers=1 if drafts else None)
    options, sampling = ENGINES[engine], PARAMS[params]
    right = run(model, sampling, **options)
    # Of some requests only, in the middle of their tokens.
    written = {token for one in right for token in one.tokens[2:12]}.difference(*PROMPTS)
    bad = min(written, key=lambda token: (sum(token in one.tokens for one in right), token))
    assert sum(bad in one.tokens[:-1] for one in right) in range(1, len(PROMPTS))
    found = run(with_nan(model, bad), sampling, **options)
    for one, expected in zip(found, right, strict=True):
        if bad not in expected.tokens[:-1] and not (drafts and one.error):
            assert (one.finish, one.error) == (expected.finish, "")
            assert one.tokens == expected.tokens
            continue
        length = [*expected.tokens, bad].index(bad) + 1
        if drafts:
            # A wrong draft's latent may be in the tile of keys that the token before it attends to,
            # whose sum is NaN then, although its probability is 0.
            assert len(one.tokens) <= length
            length = len(one.tokens)
        assert (one.finish, one.error) == ("error", NON_FINITE_LOGITS)
        assert one.tokens == expected.tokens[:length]
        assert len(one.log_probs) == len(one.top_log_probs) == length
        # On a GPU other rows of a step may come with other roundings.
        torch.testing.assert_close(one.log_probs, expected.log_probs[:length], rtol=0, atol=1e-5)


def test_progress_is_the_result():
    """Step by step, nothing is reported that is taken back; the engine has all of its blocks."""
    with engine_of(with_nan(generating_model(num_layers=1), BAD)) as engine:
        for tokens in PROMPTS:
            engine.add_request(tokens, PARAMS["greedy"])
        reported = {number: [] for number in range(len(PROMPTS))}
        ends: dict[int, int] = {}
        for step in itertools.count():
            if not engine.is_busy():
                break
            for progress in engine.step():
                reported[progress.number] += progress.tokens
                assert progress.tokens or progress.result
                if progress.result is not None:
                    ends[progress.number] = step
        results = engine.results
        engine.require_no_leak()
    assert {n: result.tokens for n, result in results.items()} == reported
    # It has failed in the first step, and may have a row in those that are launched already.
    assert ends[1] <= 3 and max(ends.values()) > 20
    # Others may write the token themselves.
    failed = {n: result.tokens for n, result in results.items() if result.finish == "error"}
    assert failed.pop(1) == [] and len(failed) < len(PROMPTS) - 1
    assert all(tokens[-1] == BAD for tokens in failed.values())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 1.3, "max_tokens": 1},
        {"min_tokens": 3, "stop_token_ids": [1]},
    ],
)
def test_a_failure_in_the_first_step(changes, ahead):
    """The sampler draws that step, while tokens of the one before are on their way."""
    # Top log-probabilities would be a reason not to launch it before that one has ended.
    sampling = SamplingParams(max_tokens=24, temperature=0)
    model = with_nan(generating_model(num_layers=1), BAD)
    [right] = engine_of(model).generate(PROMPTS[:1], sampling)
    assert BAD not in right.tokens
    engine = engine_of(model)
    engine.scheduler.launches_ahead = ahead
    with engine:
        running = engine.add_request(PROMPTS[0], sampling)
        for _ in range(4):
            engine.step()
        failing = engine.add_request([5, BAD, 7], sampling.replace(**changes))
        while engine.is_busy():
            for progress in engine.step():
                assert progress.number == running or not progress.tokens
        results = engine.results
        engine.require_no_leak()
    assert (results[failing].finish, results[failing].tokens) == ("error", [])
    assert results[failing].error == NON_FINITE_LOGITS
    assert (results[running].finish, results[running].tokens) == ("length", right.tokens)


def test_flags_that_the_scheduler_asks_for(monkeypatch):
    """They stay on the device; the CPU gets them with the tokens, and the engine's are others."""
    sampler, logits = RequestSampler(), torch.tensor([[0.5, 1.0], [torch.nan, 1.0]])
    rows = [_Row(SampledRequest(PARAMS["greedy"], 0, [], number=i), 0) for i in range(2)]
    with sampler.missing_on_device() as missing, monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", None)
        assert sampler._drawn(logits, rows).tolist() == [1, 0]
    assert [flags.tolist() for flags in missing] == [[False, True]] and not sampler.failed()
    sampler._drawn(logits, rows)
    assert sampler.failed() == {1: 0} and not sampler.failed()


def test_an_engine_goes_on():
    """Also with what it has cached of a request that failed."""
    model = generating_model(num_layers=1)
    right = engine_of(model).generate(PROMPTS, PARAMS["greedy"])
    weight = model.embedding.word_embeddings.weight
    with engine_of(model, prefix_caching=True, blocks=6) as engine:
        row = weight[BAD].clone()
        with_nan(model, BAD)
        [failed] = engine.generate(PROMPTS[1:2], PARAMS["greedy"])
        assert failed.finish == "error"
        with torch.no_grad():
            weight[BAD] = row
        for i in (0, 2, 3):
            [result] = engine.generate(PROMPTS[i : i + 1], PARAMS["greedy"])
            assert result.tokens == right[i].tokens


class TestFailures:
    """Three drafts in a step: the failure counts only if the tokens before it were accepted."""

    def test_behind_a_wrong_draft(self):
        failures = Failures()
        failures.begin_step({7: 2})
        progress = Progress(7, [1, 2])
        assert failures.cut(progress, 3) is progress and not failures.numbers
        # Of another request.
        assert failures.cut(Progress(8, [1, 2, 3]), 3).tokens == [1, 2, 3]

    def test_among_right_drafts(self):
        failures = Failures()
        failures.begin_step({7: 2})
        found = failures.cut(Progress(7, [1, 2, 3], [0.1, 0.2, 0.3]), 3)
        assert (found.tokens, found.log_probs, failures.numbers) == ([1, 2], [0.1, 0.2], {7})
        # The step that ends it.
        failures.begin_step({})
        result = Result([9, 9, 9, 1, 2, 3, 4], finish="length")
        found = failures.cut(Progress(7, [4], result=result), 6)
        assert found.tokens == [] and found.result.tokens == [9, 9, 9, 1, 2]
        assert (found.result.finish, found.result.error) == ("error", NON_FINITE_LOGITS)
        assert not failures.numbers


@pytest.mark.parametrize("engine", ["loop", "megatron"])
def test_failed_requests_are_forgotten(engine):
    """A request may have given back its rows when its failure is told."""
    options = {**ENGINES[engine], **KEPT}
    with engine_of(with_nan(generating_model(num_layers=1), BAD), **options) as made:
        blocks = made._generated
        assert blocks is not None
        for length in (1, 2, 24):
            made.generate(PROMPTS, PARAMS["greedy"].replace(max_tokens=length))
            assert not blocks._failed
