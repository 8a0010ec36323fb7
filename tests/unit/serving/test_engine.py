"""The engine generates the tokens of whole forwards, whatever its scheduler and its cache do.

Every case also says what must have happened, so that none passes because the engine had it easy.
"""

import weakref
from dataclasses import replace

import pytest
import torch
from megatron.core.inference.config import KVCacheManagementMode
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.serving.sampling.parameters import SamplingParams
from tests.support import world
from tests.support.cases import TINY, VARIANTS
from tests.support.engine import (
    CHUNKED,
    KEPT,
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
    whole_forwards,
)
from tests.support.models import MIXED as EXPERTS
from tests.support.models import gpt_model

# One token, within a block, at its end and beyond, several blocks.
LENGTHS = (1, 63, 64, 65, 130, 17)
MIXED = [Request(prompt(length, seed), 8) for seed, length in enumerate(LENGTHS)]
SHARED = [Request(prompt(100 + seed, seed, shared=70), 8) for seed in range(6)]
# All of them cross the end of a block together.
CROSSING = [Request(prompt(58, seed), 12) for seed in range(8)]
PREFIX = {"prefix_caching": True}
GRAPHS = {"num_cuda_graphs": 4}
GREEDY = SamplingParams(max_tokens=6, temperature=0)


def test_what_runs_now(model):
    """Blocks that are only cached count as free, as in vLLM's figure."""

    def now(engine):
        found = engine.statistics
        return found.running, found.waiting, found.used_blocks > 0

    with engine_of(model, **KEPT) as engine:
        for request in SHARED[:3]:
            engine.add_request(request.prompt, request.sampling())
        assert now(engine) == (0, 3, False)
        engine.step()
        running, waiting, used = now(engine)
        assert running and used and running + waiting == 3
        assert 0 < engine.statistics.cache_usage <= 1
        while engine.is_busy():
            engine.step()
        assert now(engine) == (0, 0, False) and engine.statistics.blocks


def test_the_last_step_keeps_no_request(model):
    with engine_of(model, decode_loop=False) as engine:
        add(engine, MIXED[:1])
        request = weakref.ref(engine._sampler.requests[0])
        step_to_the_end(engine)
        assert request() is None


@pytest.fixture(scope="module")
def expected(model):
    return whole_forwards(model, [*MIXED, *SHARED, *CROSSING])


PREFIXED = {**CHUNKED, **PREFIX}
DECODE_GRAPHS = {"use_cuda_graphs_for_non_decode_steps": False}
# Megatron's branch dev captures no graphs of steps that have prompts and decode.
ON_DEV = hasattr(Symbols, "CSA")
EVERYTHING = {"blocks": 11, "paused_blocks": 2, **PREFIXED, **GRAPHS}
# Requests, options, and what must have happened.
CASES = {
    "batched": (MIXED, {}, lambda run: run.most_rows == 6),
    "chunked": (MIXED, CHUNKED, lambda run: run.chunks > 2 and run.mixed_steps),
    "prefix": (SHARED, PREFIX, lambda run: run.prefix_blocks >= 5),
    "chunked-prefix": (SHARED, PREFIXED, lambda run: run.prefix_blocks and run.chunks),
    "graphs": (MIXED, {**CHUNKED, **GRAPHS}, lambda run: run.graph_steps == run.steps or ON_DEV),
    "decode-graphs": (
        MIXED,
        {**GRAPHS, "inference_config": DECODE_GRAPHS},
        lambda run: 0 < run.graph_steps < run.steps,
    ),
    "evicted": (CROSSING, {"blocks": 11}, lambda run: run.evicted),
    "paused": (
        CROSSING,
        {"blocks": 11, "paused_blocks": 5},
        lambda run: run.most_paused and not run.evicted,
    ),
    "everything": (
        [*CROSSING, *SHARED],
        EVERYTHING,
        lambda run: (
            (run.prefix_blocks and run.chunks and run.graph_steps) and run.evicted + run.most_paused
        ),
    ),
    "async": (MIXED, {"inference_config": {"async_sched_mode": "async"}}, lambda run: run.steps),
}
if ON_DEV:
    del CASES["async"]


@pytest.mark.parametrize(("requests", "options", "happened"), CASES.values(), ids=CASES)
def test_tokens_of_whole_forwards(model, expected, requests, options, happened):
    run = generate(engine_of(model, **options), requests, log_probs=True)
    assert_generates(run, expected(requests))
    assert happened(run.statistics), run.statistics


FP8 = {"latent_cache_dtype": "fp8", "train_on_cached_latents": True}
MODELS = {
    **{
        f"{form}-{size}": {"options": AbsorbedMLAOptions(form=form, context_chunk_size=size)}
        for form, size in (("auto", 7), ("absorbed", 2**16), ("expanded", 7))
    },
    "fp8": {"options": AbsorbedMLAOptions(**FP8)},
    "column-parallel": {"options": AbsorbedMLAOptions(down_projection="column_parallel")},
    "no-q-lora": {"mla": replace(TINY, q_lora_rank=None)},
    "no-rope": {"mla": replace(TINY, rope=0, rope_type="rope", kv_lora_rank=20)},
    "no-latent-norm": {"mla": replace(TINY, latent_norm=False)},
    **{name: {"mla": VARIANTS[name]} for name in ("all_variants", "gate_elementwise")},
    "experts": EXPERTS,
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    """Chunks attend to what is cached, also of others' prompts, beside requests that decode."""
    model = generating_model(**{"num_layers": 1, **MODELS[name]})
    requests = [*SHARED[:3], *MIXED[:3]]
    run = generate(engine_of(model, **CHUNKED, **PREFIX), requests, log_probs=True)
    done = run.statistics
    assert done.chunks and done.prefix_blocks and done.mixed_steps
    assert_generates(run, by_whole_forwards(model, requests))


def test_prefix_of_requests_that_have_ended(model, expected):
    """Kept under the LRU policy, and used again; Megatron evicts what it needs."""
    with engine_of(model, **KEPT) as engine:
        assert generate(engine, SHARED[:1]).statistics.prefix_blocks == 0
        again = generate(engine, SHARED[:1], log_probs=True)
    assert again.statistics.prefix_blocks == 1
    assert_generates(again, expected(SHARED[:1]))
    # What was cached may be of other weights.
    with engine:
        assert generate(engine, SHARED[:1]).statistics.prefix_blocks == 0


@pytest.fixture(scope="module")
def drafting():
    """Whose drafts are accepted at times; those of the one with one layer are not."""
    return generating_model(mtp_num_layers=2)


DRAFTED = {
    # Rejected drafts leave their latents behind in the cache, where nothing may see them.
    "rejected": (
        [Request(prompt(60, seed), 20) for seed in range(3)],
        {"num_speculative_tokens": 1},
        lambda done: 0 < done.accepted < done.drafted,
    ),
    # An eviction moves rows of requests whose next step begins in one block and ends in another.
    # Latents of the first one must not be written to a block of the request that was in that row.
    "across-blocks-after-an-eviction": (
        CROSSING[:3],
        {"blocks": 4, "paused_blocks": 1, "num_speculative_tokens": 2},
        lambda done: done.evicted,
    ),
    "beyond-the-end-of-the-context": (
        [Request(prompt(length), 76 - length) for length in (60, 70)],
        {"max_sequence_length": 76, "num_speculative_tokens": 2},
        lambda done: done.drafted,
    ),
}


@pytest.mark.parametrize(("requests", "options", "happened"), DRAFTED.values(), ids=DRAFTED)
def test_speculative_decoding(drafting, requests, options, happened):
    run = generate(engine_of(drafting, **options), requests, log_probs=True)
    assert happened(run.statistics), run.statistics
    assert_generates(run, by_whole_forwards(drafting, requests))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_drafts_in_a_crowded_cache(drafting, prefix_caching):
    """Chunks of prompts, evictions and, where they share a prefix, blocks of several requests."""
    requests = [Request(prompt(122, seed, shared=70), 20) for seed in range(4)]
    requests += [Request(prompt(length, length), 4) for length in (1, 2, 63, 64, 65)]
    options = {"blocks": 6, "paused_blocks": 1, "num_speculative_tokens": 2, **CHUNKED}
    engine = engine_of(drafting, **options, prefix_caching=prefix_caching)
    run = generate(engine, requests, log_probs=True)
    done = run.statistics
    assert done.evicted and done.most_paused and done.chunks and done.accepted
    assert bool(done.prefix_blocks) == prefix_caching
    assert_generates(run, by_whole_forwards(drafting, requests))


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
        model = generating_model(num_layers=1)
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
            add(engine, MIXED)
            for _ in range(3):
                engine.step()
            engine.host.suspend()
            engine.host.resume()
            results = step_to_the_end(engine)
        engine.require_no_leak()
        assert_generates(Run(results, engine.statistics), expected(MIXED))

    def test_changed_while_suspended(self):
        """By a training step, which tensors made under inference mode must not reach."""
        model, requests = generating_model(num_layers=1), MIXED[:3]
        with engine_of(model) as engine:
            before = generate(engine, requests)
            engine.host.suspend()
            _train(model)
            engine.host.resume()
            after = generate(engine, requests, log_probs=True)
        assert before.tokens != after.tokens
        assert_generates(after, by_whole_forwards(model, requests))

    def test_modes_that_others_leave(self):
        """As another engine of the process does when it stops, and a program that evaluates."""
        model = generating_model(num_layers=1)
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
        model = generating_model(num_layers=1)
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
