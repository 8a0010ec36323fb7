"""Megatron's dynamic engine, unmodified, over the latent cache: the tokens of whole forwards.

Every case also says what must have happened, so that none passes because the engine had it easy.
"""

from __future__ import annotations

import pytest
import torch
from megatron.core.inference.config import (
    KVCacheManagementMode,
    PrefixCachingEvictionPolicy,
)

from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.testing.engine import (
    EngineDriver,
    Request,
    dynamic_engine,
    generate,
    require_no_leak,
)
from tests.support import world
from tests.support.engine import assert_generates, by_whole_forwards, generating_model, prompt

SIZES = {"blocks": 30, "max_sequence_length": 256, "max_requests": 8, "max_tokens": 192}
# One token, within a block, at its end and beyond, several blocks.
LENGTHS = (1, 63, 64, 65, 130, 17)
MIXED = [Request(prompt(length, seed), 8) for seed, length in enumerate(LENGTHS)]
SHARED = [Request(prompt(100 + seed, seed, shared=70), 8) for seed in range(6)]
# All of them cross the end of a block together.
CROSSING = [Request(prompt(58, seed), 12) for seed in range(8)]
CHUNKED = {"enable_chunked_prefill": True, "max_tokens": 64}
PREFIX = {"enable_prefix_caching": True}
GRAPHS = {"num_cuda_graphs": 4}


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
    ("requests", "config", "happened"),
    [
        pytest.param(MIXED, {}, lambda run: run.most_rows == 6, id="batched"),
        pytest.param(MIXED, CHUNKED, lambda run: run.chunks > 2 and run.mixed_steps, id="chunked"),
        pytest.param(SHARED, PREFIX, lambda run: run.prefix_blocks >= 5, id="prefix"),
        pytest.param(
            SHARED,
            {**CHUNKED, **PREFIX},
            lambda run: run.prefix_blocks and run.chunks,
            id="chunked-prefix",
        ),
        pytest.param(
            MIXED, {**CHUNKED, **GRAPHS}, lambda run: run.graph_steps == run.steps, id="graphs"
        ),
        pytest.param(
            MIXED,
            {**GRAPHS, "use_cuda_graphs_for_non_decode_steps": False},
            lambda run: 0 < run.graph_steps < run.steps,
            id="decode-graphs",
        ),
        pytest.param(CROSSING, {"blocks": 11}, lambda run: run.evicted, id="evicted"),
        pytest.param(
            CROSSING,
            {"blocks": 11, "paused_blocks": 5},
            lambda run: run.most_paused and not run.evicted,
            id="paused",
        ),
        pytest.param(
            [*CROSSING, *SHARED],
            {"blocks": 13, "paused_blocks": 2, **CHUNKED, **PREFIX, **GRAPHS},
            lambda run: (
                run.prefix_blocks
                and run.chunks
                and run.graph_steps
                and run.evicted + run.most_paused
            ),
            id="everything",
        ),
        pytest.param(MIXED, {"async_sched_mode": "async"}, lambda run: run.steps, id="async"),
    ],
)
def test_tokens_of_whole_forwards(model, expected, requests, config, happened):
    with dynamic_engine(model, **{**SIZES, **config}) as engine:
        run = generate(engine, requests, log_probs=True)
        require_no_leak(engine)
    assert_generates(run, expected(requests))
    assert happened(run), run


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_forms(form):
    """Chunks attend to cached context, each form in its own way; auto is tested above."""
    model = generating_model(AbsorbedMLAOptions(form=form, context_chunk_size=48))
    with dynamic_engine(model, **{**SIZES, **CHUNKED, **PREFIX}) as engine:
        run = generate(engine, SHARED[:3], log_probs=True)
    assert run.chunks and run.prefix_blocks
    assert_generates(run, by_whole_forwards(model, SHARED[:3]))


def test_single_requests(model):
    """One after the other, and all together with everything that shares and takes away blocks."""
    alone = []
    with dynamic_engine(model, **SIZES) as engine:
        for request in CROSSING:
            alone += generate(engine, [request]).tokens
            require_no_leak(engine)
    with dynamic_engine(model, **{**SIZES, "blocks": 11, **CHUNKED, **PREFIX, **GRAPHS}) as engine:
        assert generate(engine, CROSSING).tokens == alone


def test_prefix_of_requests_that_have_ended(model, expected):
    """Kept under the LRU policy, and used again; the host evicts what it needs."""
    config = {**PREFIX, "prefix_caching_eviction_policy": PrefixCachingEvictionPolicy.LRU}
    with dynamic_engine(model, **{**SIZES, **config}) as engine:
        assert generate(engine, SHARED[:1]).prefix_blocks == 0
        require_no_leak(engine)
        again = generate(engine, SHARED[:1], log_probs=True)
        require_no_leak(engine)
    assert again.prefix_blocks == 1
    assert_generates(again, expected(SHARED[:1]))


@pytest.mark.parametrize("drafts", [1, 2])
def test_speculative_decoding(drafts):
    """Rejected drafts leave their latents behind in the cache, where nothing may see them."""
    model = generating_model(mtp_num_layers=2)
    requests = [Request(prompt(60, seed), 20) for seed in range(3)]
    with dynamic_engine(model, **SIZES, num_speculative_tokens=drafts) as engine:
        run = generate(engine, requests)
        require_no_leak(engine)
        proposed = int(engine._spec_tokens_proposed_per_pos[-1])
        accepted = int(engine._spec_tokens_accepted_per_pos[0])
    assert run.tokens == [result.tokens for result in by_whole_forwards(model, requests)]
    assert 0 < accepted < proposed


class TestLiveWeights:
    """The engine runs the module that is trained, with the weights that it has."""

    @pytest.mark.parametrize("mode", list(KVCacheManagementMode))
    def test_suspended_and_resumed(self, model, expected, mode):
        with dynamic_engine(model, **SIZES, kv_cache_management_mode=mode) as engine:
            driver = EngineDriver(engine)
            for request in MIXED:
                driver.add(request)
            for _ in range(3):
                driver.step()
            engine.suspend()
            engine.resume()
            while driver.is_busy():
                driver.step()
            require_no_leak(engine)
        assert_generates(driver.finish(), expected(MIXED))

    def test_changed_between_requests(self):
        """By a training step, which tensors made under inference mode must not reach."""
        model, requests = generating_model(), MIXED[:3]
        with dynamic_engine(model, **SIZES) as engine:
            before = generate(engine, requests)
            engine.suspend()
            _train(model)
            engine.resume()
            after = generate(engine, requests, log_probs=True)
        assert before.tokens != after.tokens
        assert_generates(after, by_whole_forwards(model, requests))


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
