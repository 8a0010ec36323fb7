"""Blocks of generated tokens are found by later prompts, and hold what a prompt's would."""

from __future__ import annotations

import random

import pytest
import torch

from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.serving.sampling.parameters import SamplingParams
from tests.support.engine import (
    CHUNKED,
    KEPT,
    Request,
    assert_generates,
    by_whole_forwards,
    engine_of,
    generate,
    prompt,
    step_to_the_end,
)
from tests.support.overlap_scheduler import parity_model

FIRST = Request(prompt(60), 90)
WAYS = {
    "overlap": {},
    "megatron": {"decode_loop": False},
    "chunks": CHUNKED,
    "graphs": {"num_cuda_graphs": 4},
    "drafts": {"num_speculative_tokens": 2},
    "offload": {"blocks": 4, "host_cache_tokens": 512, "max_requests": 1, **CHUNKED},
}


def next_turn(text, seed=9) -> Request:
    return Request([*text, *prompt(5, seed)], 6)


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_next_turn(model, drafting, options):
    """It finds the last answer: 149 tokens of the first turn have latents, in two full blocks."""
    if "num_speculative_tokens" in options:
        model = drafting
    with engine_of(model, **KEPT | options) as engine:
        [answer] = generate(engine, [FIRST]).tokens
        later = next_turn([*FIRST.prompt, *answer])
        run = generate(engine, [later], log_probs=True)
    assert run.statistics.prefix_blocks == 2
    assert_generates(run, by_whole_forwards(model, [later]))


def test_stop_token(model):
    """A request that finishes while the next step is in flight."""
    with engine_of(model, **KEPT) as engine:
        [answer] = generate(engine, [FIRST]).tokens
        stop = next(i for i, token in enumerate(answer) if i > 70 and token not in answer[:i])
        engine.stop()
        engine.start()
        params = FIRST.sampling().replace(stop_token_ids=(answer[stop],))
        [result] = engine.generate([FIRST.prompt], params)
        assert result.tokens == answer[: stop + 1]
        run = generate(engine, [next_turn([*FIRST.prompt, *result.tokens])])
        assert run.statistics.prefix_blocks == (60 + stop) // 64


def test_evicted_requests_find_their_own_blocks(model):
    requests = [Request(prompt(60, seed), 100) for seed in range(3)]
    run = generate(engine_of(model, blocks=7, **KEPT), requests, log_probs=True)
    assert run.statistics.evicted and run.statistics.prefix_blocks
    assert_generates(run, by_whole_forwards(model, requests))


@pytest.mark.parametrize("options", [{}, {"decode_loop": False}], ids=["overlap", "megatron"])
@pytest.mark.parametrize("length", [5, 90], ids=["last-step", "before"])
def test_failed_requests_leave_nothing(model, options, length):
    """Also where the step that fails is the last one, and fills a block."""
    with engine_of(model, **KEPT | options) as engine:
        engine.add_request(FIRST.prompt, Request(FIRST.prompt, length).sampling())
        for _ in range(min(length, 81) - 1):
            engine.step()
        with model.register_forward_hook(lambda *call: call[-1].fill_(torch.nan)):
            [result] = step_to_the_end(engine)
        assert result.error
        assert not engine.host.context.kv_block_allocator.kv_hash_to_block_id


def test_other_end_of_the_same_text(model):
    """Only the first block is shared."""
    with engine_of(model, **KEPT) as engine:
        [answer] = generate(engine, [FIRST]).tokens
        later = next_turn([*FIRST.prompt, *answer[:40]])
        run = generate(engine, [later], log_probs=True)
    assert run.statistics.prefix_blocks == 1
    assert_generates(run, by_whole_forwards(model, [later]))


def test_ends_are_evicted_before_beginnings(model):
    with engine_of(model, blocks=4, **KEPT) as engine:
        [answer] = generate(engine, [FIRST]).tokens
        generate(engine, [Request(prompt(130, 5), 2)])
        run = generate(engine, [next_turn([*FIRST.prompt, *answer])])
    assert run.statistics.prefix_blocks == 1


def test_two_of_the_same_text(model):
    """They compute its blocks at the same time; one of each is kept, and a shared prompt is one."""
    with engine_of(model, **KEPT) as engine:
        same = Request(prompt(70), 80)
        run = generate(engine, [same, same])
        assert run.statistics.prefix_blocks == 1
        assert len(engine.host.context.kv_block_allocator.kv_hash_to_block_id) == 2
        assert run.tokens[0] == run.tokens[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="parity mode has no fp32 on a GPU")
@pytest.mark.parametrize("options", [{}, {"decode_loop": False}], ids=["overlap", "megatron"])
def test_chats_in_a_small_cache_have_the_bits_of_requests_alone(options):
    """Turns of several chats, some aborted, in a cache that evicts requests and blocks."""
    choose = random.Random(3)
    with batch_invariant_mode():
        model = parity_model(num_layers=1)
        alone = engine_of(model)
        chats = [prompt(length, length) for length in (20, 50, 61, 90)]
        asked, found, evicted = [], 0, 0
        with engine_of(model, blocks=6, **KEPT | CHUNKED | options) as engine:
            for _ in range(3):
                sampling = [
                    SamplingParams(max_tokens=choose.randrange(20, 50), seed=7, logprobs=0)
                    for _ in chats
                ]
                numbers = [engine.add_request(*each) for each in zip(chats, sampling)]
                to_abort = {choose.randrange(1, 40): choose.choice(numbers)}
                steps = 0
                while engine.is_busy():
                    if (steps := steps + 1) in to_abort:
                        engine.abort(to_abort[steps])
                    engine.step()
                engine.require_no_leak()
                results = [engine.results[number] for number in numbers]
                asked += zip(chats, sampling, results)
                chats = [[*one, *done.tokens, 1, 2] for one, done in zip(chats, results)]
            found, evicted = engine.statistics.prefix_blocks, engine.statistics.evicted
        assert found and evicted
        for text, params, result in asked:
            [expected] = alone.generate([text], params)
            count = len(result.tokens)
            assert result.tokens == expected.tokens[:count]
            assert result.log_probs == expected.log_probs[:count]
