"""A cache that is full of blocks of ended requests serves others as an empty one does."""

import functools
import random
from contextlib import closing

import pytest

from absorbed_mla import LLM
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.serving.sampling.parameters import SamplingParams
from tests.support.combinations import grid, thinned
from tests.support.engine import (
    CHUNKED,
    KEPT,
    Request,
    add,
    engine_of,
    generate,
    generating_model,
    prompt,
)
from tests.support.overlap_scheduler import count_calls

FP8 = AbsorbedMLAOptions(latent_cache_dtype="fp8")
# Each leaves a block in the prefix cache, and needs a third one after a few tokens.
CROSSING = [Request(prompt(124, seed), 8) for seed in range(9)]


def tokens_without_sharing(model, requests) -> list[list[int]]:
    """In a cache with room for all requests, of which none finds another's blocks."""
    engine = engine_of(model, blocks=4 * len(requests), max_requests=len(requests))
    return generate(engine, requests).tokens


@functools.cache
def crossing(model) -> list[list[int]]:
    return tokens_without_sharing(model, CROSSING)


WAYS = (
    {},
    {"decode_loop": False},
    CHUNKED,
    {"num_speculative_tokens": 2},
    {"num_cuda_graphs": 4},
    {"paused_blocks": 1, "blocks": 7},
    {"host_cache_tokens": 128, "blocks": 5, **CHUNKED, "max_requests": 2},
    {"prefix_cache_dir": "prefixes"},
)


@grid(1, {"together": [2, 1], "options": {"-".join(way) or "default": way for way in WAYS}})
def test_blocks_of_ended_requests_are_given_up(model, drafting, options, together, tmp_path):
    """All of them before a request that runs, in a cache with room for two requests."""
    if "num_speculative_tokens" in options:
        model = drafting
    if "prefix_cache_dir" in options:
        options = {"prefix_cache_dir": tmp_path / "prefixes"}
    with engine_of(model, **{"blocks": 6, "max_requests": together, **KEPT, **options}) as engine:
        for first in range(0, len(CROSSING), 3):
            part = CROSSING[first : first + 3]
            run = generate(engine, part)
            assert run.tokens == crossing(model)[first : first + 3]
            assert not run.statistics.evicted and not run.statistics.most_paused
        assert len(engine.host.context.kv_block_allocator.kv_hash_to_block_id) < len(CROSSING)
        again = generate(engine, CROSSING[-1:])
        assert again.statistics.prefix_blocks == 1
        assert again.tokens == crossing(model)[-1:]


def test_latents_in_fp8():
    model = generating_model(FP8, num_layers=1)
    with engine_of(model, blocks=3, max_requests=1, **KEPT) as engine:
        run = generate(engine, CROSSING)
    assert run.tokens == crossing(model)


def test_llm(model):
    """As it comes, but for its size."""
    sampling = SamplingParams(max_tokens=8, temperature=0)
    prompts = [request.prompt for request in CROSSING]
    made = LLM.from_model(model, tokenizer="bytes", max_model_len=192, max_num_seqs=1)
    with closing(made) as llm:
        llm.wake()
        for _ in range(2):
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            found = [output.outputs[0].token_ids for output in outputs]
            assert found == crossing(model)
        found = llm.statistics().prefix_blocks
        llm.generate(prompts[-1:], sampling, use_tqdm=False)
        assert llm.statistics().prefix_blocks == found + 1


def test_the_overlap_scheduler_goes_on(model):
    """Cached blocks are no reason to leave a step to Megatron's scheduler."""
    with engine_of(model, blocks=3, max_requests=1, **KEPT) as engine:
        for request in CROSSING[:3]:
            generate(engine, [request])
            assert engine.scheduler.last is not None
        finished = count_calls(engine)
        run = generate(engine, CROSSING[3:4])
        assert finished and not any(finished)
    assert run.tokens == crossing(model)[3:4]


class TestSharedBlocks:
    """Blocks of several requests are counted once, where Megatron counts them for each."""

    def test_nobody_is_evicted(self, model):
        """Two requests with one beginning of two blocks have room for a block each."""
        shared = [Request(prompt(128), 9), Request(prompt(128), 9)]
        run = generate(engine_of(model, blocks=4, **KEPT, decode_loop=False), shared)
        assert not run.statistics.evicted and not run.statistics.most_paused
        assert run.tokens == tokens_without_sharing(model, shared)

    @pytest.mark.parametrize("decode_loop", [True, False])
    def test_an_eviction_that_frees_nothing(self, model, decode_loop):
        """All three need a block at once; the last one has no block of its own."""
        requests = [Request(prompt(64, 1), 70), Request(prompt(128), 70), Request(prompt(128), 5)]
        with engine_of(model, blocks=5, step_tokens=256, **KEPT, decode_loop=decode_loop) as engine:
            for step in range(1000):
                if step in (0, 64):
                    add(engine, requests[:2] if step == 0 else requests[2:])
                if not engine.is_busy():
                    break
                engine.step()
            assert engine.statistics.evicted == 2 and engine.statistics.prefix_blocks >= 2
            found = [engine.results[number].tokens for number in range(3)]
        assert found == tokens_without_sharing(model, requests)


def random_case(seed: int) -> tuple[dict, list[Request]]:
    """Options of a small engine, and requests of which some begin as others do."""
    draw = random.Random(seed)
    drafts = draw.choice([0, 0, 1, 2])
    options = {
        "blocks": draw.choice([4, 5, 6, 8, 12]),
        "paused_blocks": draw.choice([0, 0, 0, 1]),
        "max_requests": draw.choice([1, 2, 3, 8]),
        "num_speculative_tokens": drafts,
        **draw.choice([{}, CHUNKED, {**CHUNKED, "step_tokens": 128}]),
        **KEPT,
    }
    requests = []
    for _ in range(8):
        length = draw.choice([1, 60, 62, 64, 65, 100, 120, 128, 150])
        text = prompt(length, draw.randrange(4), min(length, draw.choice([0, 64, 70, 128])))
        requests.append(Request(text, draw.choice([1, 5, 20, 35])))
    return options, requests


@pytest.mark.parametrize("seed", range(4) if thinned() else range(10))
def test_random_traces(model, drafting, seed):
    """The same requests by Megatron's scheduler, by the overlap scheduler, and ahead of it."""
    options, requests = random_case(seed)
    drafts = options["num_speculative_tokens"]
    of = drafting if drafts else model
    expected = tokens_without_sharing(of, requests)
    ways = ((False, False), (True, False), (True, True))
    for loop, ahead in ways[seed % 3 :][:1] if thinned() and not drafts else ways:
        with engine_of(of, **options, decode_loop=loop) as engine:
            if engine.scheduler is not None:
                engine.scheduler.launches_ahead = ahead
            for _ in range(2):
                assert generate(engine, requests).tokens == expected
        if drafts:
            break
