"""The engine generates the tokens of whole forwards, whatever its scheduler and its cache do.

Every case also says what must have happened, so that none passes because the engine had it easy.
"""

from __future__ import annotations

import pytest
import torch
from megatron.core.inference.config import (
    KVCacheManagementMode,
    PrefixCachingEvictionPolicy,
)
from megatron.core.inference.utils import InferenceMode

from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.serving.sampling.parameters import SamplingParams
from tests.support import world
from tests.support.engine import (
    Request,
    assert_generates,
    by_whole_forwards,
    engine_of,
    generate,
    generating_model,
    prompt,
)
from tests.support.models import gpt_model

# One token, within a block, at its end and beyond, several blocks.
LENGTHS = (1, 63, 64, 65, 130, 17)
MIXED = [Request(prompt(length, seed), 8) for seed, length in enumerate(LENGTHS)]
SHARED = [Request(prompt(100 + seed, seed, shared=70), 8) for seed in range(6)]
# All of them cross the end of a block together.
CROSSING = [Request(prompt(58, seed), 12) for seed in range(8)]
CHUNKED = {"chunked_prefill": True, "step_tokens": 64}
PREFIX = {"prefix_caching": True}
GRAPHS = {"num_cuda_graphs": 4}
GREEDY = SamplingParams(max_tokens=6, temperature=0)


@pytest.fixture(scope="module")
def model():
    return generating_model()


@pytest.fixture(scope="module")
def expected(model):
    """Results of whole forwards by request, each computed once."""
    known = [*MIXED, *SHARED, *CROSSING]
    found = dict(zip(map(id, known), by_whole_forwards(model, known)))
    return lambda requests: [found[id(request)] for request in requests]


@pytest.mark.parametrize(
    ("requests", "options", "happened"),
    [
        pytest.param(MIXED, {}, lambda done: done.most_rows == 6, id="batched"),
        pytest.param(
            MIXED, CHUNKED, lambda done: done.chunks > 2 and done.mixed_steps, id="chunked"
        ),
        pytest.param(SHARED, PREFIX, lambda done: done.prefix_blocks >= 5, id="prefix"),
        pytest.param(
            SHARED,
            {**CHUNKED, **PREFIX},
            lambda done: done.prefix_blocks and done.chunks,
            id="chunked-prefix",
        ),
        pytest.param(
            MIXED, {**CHUNKED, **GRAPHS}, lambda done: done.graph_steps == done.steps, id="graphs"
        ),
        pytest.param(
            MIXED,
            {**GRAPHS, "inference_config": {"use_cuda_graphs_for_non_decode_steps": False}},
            lambda done: 0 < done.graph_steps < done.steps,
            id="decode-graphs",
        ),
        pytest.param(CROSSING, {"blocks": 11}, lambda done: done.evicted, id="evicted"),
        pytest.param(
            CROSSING,
            {"blocks": 11, "paused_blocks": 5},
            lambda done: done.most_paused and not done.evicted,
            id="paused",
        ),
        pytest.param(
            [*CROSSING, *SHARED],
            {"blocks": 11, "paused_blocks": 2, **CHUNKED, **PREFIX, **GRAPHS},
            lambda done: (
                done.prefix_blocks
                and done.chunks
                and done.graph_steps
                and done.evicted + done.most_paused
            ),
            id="everything",
        ),
        pytest.param(
            MIXED,
            {"inference_config": {"async_sched_mode": "async"}},
            lambda done: done.steps,
            id="async",
        ),
    ],
)
def test_tokens_of_whole_forwards(model, expected, requests, options, happened):
    run = generate(engine_of(model, **options), requests, log_probs=True)
    assert_generates(run, expected(requests))
    assert happened(run.statistics), run.statistics


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_forms(form):
    """Chunks attend to cached context, each form in its own way; auto is tested above."""
    model = generating_model(AbsorbedMLAOptions(form=form, context_chunk_size=48))
    run = generate(engine_of(model, **CHUNKED, **PREFIX), SHARED[:3], log_probs=True)
    assert run.statistics.chunks and run.statistics.prefix_blocks
    assert_generates(run, by_whole_forwards(model, SHARED[:3]))


def test_single_requests(model):
    """One after the other, and all together with everything that shares and takes away blocks."""
    with engine_of(model) as engine:
        alone = [generate(engine, [request]).tokens[0] for request in CROSSING]
    everything = engine_of(model, blocks=11, **CHUNKED, **PREFIX, **GRAPHS)
    assert generate(everything, CROSSING).tokens == alone


def test_prefix_of_requests_that_have_ended(model, expected):
    """Kept under the LRU policy, and used again; Megatron evicts what it needs."""
    policy = {"prefix_caching_eviction_policy": PrefixCachingEvictionPolicy.LRU}
    with engine_of(model, **PREFIX, inference_config=policy) as engine:
        assert generate(engine, SHARED[:1]).statistics.prefix_blocks == 0
        again = generate(engine, SHARED[:1], log_probs=True)
    assert again.statistics.prefix_blocks == 1
    assert_generates(again, expected(SHARED[:1]))
    # What was cached may be of other weights.
    with engine:
        assert generate(engine, SHARED[:1]).statistics.prefix_blocks == 0


@pytest.mark.parametrize("drafts", [1, 2])
def test_speculative_decoding(drafts):
    """Rejected drafts leave their latents behind in the cache, where nothing may see them."""
    model = generating_model(mtp_num_layers=2)
    requests = [Request(prompt(60, seed), 20) for seed in range(3)]
    engine = engine_of(model, num_speculative_tokens=drafts)
    run = generate(engine, requests)
    assert run.tokens == [result.tokens for result in by_whole_forwards(model, requests)]
    assert 0 < run.statistics.accepted < run.statistics.drafted


@pytest.mark.parametrize("drafts", [1, 2])
def test_drafts_across_blocks_after_an_eviction(drafts):
    """An eviction moves rows of requests whose next step begins in one block and ends in another.

    Latents of the first one must not be written to a block of the request that was in that row.
    """
    model = generating_model(mtp_num_layers=2)
    requests = CROSSING[:3]
    options = {"blocks": 4, "paused_blocks": 1, "num_speculative_tokens": drafts}
    run = generate(engine_of(model, **options), requests, log_probs=True)
    assert run.statistics.evicted
    assert_generates(run, by_whole_forwards(model, requests))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_drafts_in_a_crowded_cache(prefix_caching):
    """Chunks of prompts, evictions and, where they share a prefix, blocks of several requests."""
    model = generating_model(mtp_num_layers=2)
    requests = [Request(prompt(122, seed, shared=70), 20) for seed in range(4)]
    requests += [Request(prompt(length, length), 4) for length in (1, 2, 63, 64, 65)]
    options = {"blocks": 6, "paused_blocks": 1, "num_speculative_tokens": 2, **CHUNKED}
    engine = engine_of(model, **options, prefix_caching=prefix_caching)
    run = generate(engine, requests, log_probs=True)
    done = run.statistics
    assert done.evicted and done.most_paused and done.chunks and done.accepted
    assert bool(done.prefix_blocks) == prefix_caching
    assert_generates(run, by_whole_forwards(model, requests))


@pytest.mark.parametrize("drafts", [1, 2])
def test_drafts_beyond_the_end_of_the_context(drafts):
    model = generating_model(mtp_num_layers=2)
    requests = [Request(prompt(length), 76 - length) for length in (60, 70)]
    run = generate(
        engine_of(model, max_sequence_length=76, num_speculative_tokens=drafts), requests
    )
    assert_generates(run, by_whole_forwards(model, requests))


def test_progress_reports_every_token_once(model):
    """Also of requests that are evicted, and of one that is refused."""
    requests = [*CROSSING, Request([], 3)]
    reported, ends = [[] for _ in requests], {}

    def report(progress):
        reported[progress.number] += progress.tokens
        if progress.result is not None:
            assert progress.number not in ends
            ends[progress.number] = progress.result

    engine = engine_of(model, blocks=11)
    results = engine.generate(
        [request.prompt for request in requests],
        [request.sampling() for request in requests],
        report,
    )
    assert engine.statistics.evicted
    assert reported == [result.tokens for result in results]
    assert [ends[number] for number in range(len(requests))] == results


class TestSampling:
    def test_seeds(self, model):
        prompts = [prompt(3), prompt(17)]
        params = SamplingParams(max_tokens=20, temperature=2.0)

        def tokens_of(engine):
            return [result.tokens for result in engine.generate(prompts, params)]

        engine = engine_of(model, seed=5)
        first, second = tokens_of(engine), tokens_of(engine)
        engine.reseed(5)
        assert tokens_of(engine) == first != second
        assert tokens_of(engine_of(model, seed=5)) == first
        assert tokens_of(engine_of(model, seed=6)) != first

    def test_padding_of_the_vocabulary_is_not_generated(self):
        model = generating_model()
        # The logits of the last four rows are the largest, by far.
        with torch.no_grad():
            model.output_layer.weight[60:] *= 100
        loose, tight = (
            max(max(result.tokens) for result in engine.generate([prompt(3), prompt(17)], GREEDY))
            for engine in (engine_of(model), engine_of(model, vocab_size=60))
        )
        assert loose >= 60 > tight

    def test_as_many_as_prompts(self, model):
        with pytest.raises(ValueError, match="2 prompts and 1 samplings"):
            engine_of(model).generate([[1], [2]], [GREEDY])


class TestLiveModel:
    """The engine runs the module that is trained, with the weights that it has."""

    @pytest.mark.parametrize("mode", list(KVCacheManagementMode))
    def test_suspended_and_resumed(self, model, expected, mode):
        with engine_of(model, inference_config={"kv_cache_management_mode": mode}) as engine:
            for request in MIXED:
                engine.add_request(request.prompt, request.sampling())
            for _ in range(3):
                engine.step()
            engine.host.suspend()
            engine.host.resume()
            while engine.is_busy():
                engine.step()
        engine.require_no_leak()
        tokens = [engine.results[number].tokens for number in range(len(MIXED))]
        assert tokens == [result.tokens for result in expected(MIXED)]

    def test_changed_while_suspended(self):
        """By a training step, which tensors made under inference mode must not reach."""
        model, requests = generating_model(), MIXED[:3]
        with engine_of(model) as engine:
            before = generate(engine, requests)
            engine.host.suspend()
            _train(model)
            engine.host.resume()
            after = generate(engine, requests, log_probs=True)
        assert before.tokens != after.tokens
        assert_generates(after, by_whole_forwards(model, requests))

    def test_changed_between_calls(self):
        """A prefix that was cached before is not used."""
        model, engine = (made := generating_model()), engine_of(made, **CHUNKED, **PREFIX)
        before = generate(engine, SHARED[:2], log_probs=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        after = generate(engine, SHARED[:2], log_probs=True)
        assert after.results != before.results
        fresh = engine_of(model, **CHUNKED, **PREFIX)
        assert after.results == generate(fresh, SHARED[:2], log_probs=True).results

    def test_modes_that_others_leave(self):
        """As another engine of the process does when it stops, and a program that evaluates."""
        model = generating_model()
        requests = [Request(prompt(length, length), length % 4 + 2) for length in (5, 11, 33)]
        expected = by_whole_forwards(model, requests)

        def leave(progress):
            InferenceMode.unset_active()
            model.train()

        engine = engine_of(model, max_requests=2)
        leave(None)
        results = engine.generate(
            [request.prompt for request in requests],
            [request.sampling() for request in requests],
            leave,
        )
        assert [result.tokens for result in results] == [one.tokens for one in expected]

    @pytest.mark.parametrize("training", [True, False])
    def test_goes_on_after_an_interruption(self, training):
        model = generating_model()
        model.train(training)
        engine = engine_of(model)
        assert not InferenceMode.is_active() and model.training is training
        expected = engine.generate([prompt(3)], GREEDY)

        def interrupt(progress):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.generate([prompt(3), prompt(70)], GREEDY, interrupt)
        assert not InferenceMode.is_active() and model.training is training
        # Nothing is left of the interrupted requests.
        assert engine.generate([prompt(3)], GREEDY) == expected
        engine.close()
        tokens = torch.arange(16, device=world.device())[None]
        model(tokens, tokens, None, labels=tokens).sum().backward()

    def test_started_once(self, model):
        with engine_of(model) as engine:
            with pytest.raises(RuntimeError, match="started or closed"):
                engine.start()
            engine.add_request([1], GREEDY)
            with pytest.raises(RuntimeError, match="without requests"):
                engine.generate([[1]], GREEDY)
        engine.close()
        with pytest.raises(RuntimeError, match="started or closed"):
            engine.start()

    def test_without_a_latent_cache(self):
        with pytest.raises(ValueError, match="cache_mla_latents=True"):
            engine_of(gpt_model(num_layers=1))


def _train(model) -> None:
    """One large step, forward and backward at the length that the engine's tables have."""
    ids = torch.tensor([prompt(256)], device=world.device())
    positions = torch.arange(256, device=world.device())[None]
    model.train()
    model(ids, positions, None, labels=ids.roll(-1)).mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad.sign() * 0.05)
    model.eval()
