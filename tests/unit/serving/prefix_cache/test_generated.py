"""Blocks of generated tokens are found by later prompts, and hold what a prompt's would."""

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

FIRST = Request(prompt(60), 70)
# Lengths and salts of beginnings.
CHATS = ((20, None), (50, None), (80, None), (90, None), (90, "a"))
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


@pytest.mark.parametrize(
    ("options", "taken", "blocks"),
    [*((options, None, 2) for options in WAYS.values()), ({}, 40, 1)],
    ids=[*WAYS, "other end"],
)
def test_next_turn(model, drafting, options, taken, blocks):
    """It finds the last answer: 129 tokens of the first turn have latents, in two full blocks.

    Of a text with another end only the first block is shared.
    """
    if "num_speculative_tokens" in options:
        model = drafting
    with engine_of(model, **KEPT | options) as engine:
        [answer] = generate(engine, [FIRST]).tokens
        later = next_turn([*FIRST.prompt, *answer[:taken]])
        run = generate(engine, [later], log_probs=True)
    assert run.statistics.prefix_blocks == blocks
    assert_generates(run, by_whole_forwards(model, [later]))


@pytest.mark.parametrize("blocks", [30, 3], ids=["at-the-end", "evicted"])
def test_next_turn_after_a_restart(model, tmp_path, blocks):
    options = {"prefix_caching": True, "prefix_cache_dir": tmp_path}
    with engine_of(model, blocks=blocks, **options) as engine:
        [answer] = generate(engine, [FIRST]).tokens
        generate(engine, [Request(prompt(130, 5), 2)])
    later = next_turn([*FIRST.prompt, *answer])
    run = generate(engine_of(model, **options), [later], log_probs=True)
    assert run.statistics.disk_blocks == 2
    assert_generates(run, by_whole_forwards(model, [later]))


def test_stop_token(model):
    """A request that finishes while the next step is in flight."""
    with engine_of(model, **KEPT) as engine:
        [answer] = generate(engine, [FIRST]).tokens
        stop = next(i for i, token in enumerate(answer) if i > 5 and token not in answer[:i])
        engine.stop()
        engine.start()
        params = FIRST.sampling().replace(stop_token_ids=(answer[stop],))
        [result] = engine.generate([FIRST.prompt], params)
        assert result.tokens == answer[: stop + 1]
        run = generate(engine, [next_turn([*FIRST.prompt, *result.tokens])])
        assert run.statistics.prefix_blocks == (60 + stop) // 64


def test_evicted_requests_find_their_own_blocks(model):
    requests = [Request(prompt(60, seed), 72) for seed in range(3)]
    run = generate(engine_of(model, blocks=7, **KEPT), requests, log_probs=True)
    assert run.statistics.evicted and run.statistics.prefix_blocks
    assert_generates(run, by_whole_forwards(model, requests))


@pytest.mark.parametrize("options", [{}, {"decode_loop": False}], ids=["overlap", "megatron"])
@pytest.mark.parametrize("length", [5, 90], ids=["last-step", "before"])
def test_failed_requests_leave_nothing(model, options, length):
    """Also where the step that fails is the last one, and fills a block."""
    with engine_of(model, **KEPT | options) as engine:
        engine.add_request(FIRST.prompt, Request(FIRST.prompt, length).sampling())
        for _ in range(min(length, 9) - 1):
            engine.step()
        with model.register_forward_hook(lambda *call: call[-1].fill_(torch.nan)):
            [result] = step_to_the_end(engine)
        assert result.error
        assert not engine.host.context.kv_block_allocator.kv_hash_to_block_id


def test_ends_are_evicted_before_beginnings(model):
    with engine_of(model, blocks=4, **KEPT) as engine:
        [answer] = generate(engine, [FIRST]).tokens
        generate(engine, [Request(prompt(130, 5), 2)])
        run = generate(engine, [next_turn([*FIRST.prompt, *answer])])
    assert run.statistics.prefix_blocks == 1


def test_two_of_the_same_text(model):
    """They compute its blocks at the same time; one of each is kept, and a shared prompt is one."""
    with engine_of(model, **KEPT) as engine:
        same = Request(prompt(70), 60)
        run = generate(engine, [same, same])
        assert run.statistics.prefix_blocks == 1
        assert len(engine.host.context.kv_block_allocator.kv_hash_to_block_id) == 2
        assert run.tokens[0] == run.tokens[1]


@pytest.fixture(scope="module")
def parity():
    """In parity mode, with a layer that drafts."""
    if torch.cuda.is_available():
        pytest.skip("parity mode has no fp32 on a GPU")
    with batch_invariant_mode():
        yield parity_model(num_layers=1, mtp_num_layers=1)


def contents(engine) -> dict[int, torch.Tensor]:
    """By hash, the latents of every block in the prefix cache, [layers, block_size, width]."""
    context = engine.host.context
    known = context.kv_block_allocator.kv_hash_to_block_id
    return {value: context.memory_buffer[:, block].clone() for value, block in known.items()}


def random_sampling(draw: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=draw.randrange(20, 60),
        temperature=draw.choice([0, 1.0]),
        seed=7,
        logprobs=draw.choice([0, 3]),
        stop_token_ids=draw.choice([(), (), (7,)]),
        prompt_logprobs=draw.choice([None, None, 0]),
    )


@pytest.mark.parametrize("options", [{}, {"num_speculative_tokens": 1}], ids=["overlap", "drafts"])
def test_random_chats(parity, options):
    """Turns of chats in a cache that evicts requests and blocks: answers and blocks have the bits
    of requests alone, and of prompts that find nothing.

    Some are aborted, some texts are cut, as stop strings do, and some chats have one beginning.
    """
    draw, asked, registered = random.Random(5), [], {}
    chats = [(prompt(size, size, min(size, 70)), salt) for size, salt in CHATS]
    small = {"blocks": 6, "prompt_logprobs": True, **KEPT, **CHUNKED, **options}
    with engine_of(parity, **small) as engine:
        for _ in range(3):
            sampling = [random_sampling(draw) for _ in chats]
            numbers = [engine.add_request(c[0], s, c[1]) for c, s in zip(chats, sampling)]
            to_abort = {draw.randrange(1, 40): draw.choice(numbers)}
            while engine.is_busy():
                if (number := to_abort.pop(engine.statistics.steps, None)) is not None:
                    engine.abort(number)
                engine.step()
                for value, latents in contents(engine).items():
                    assert torch.equal(registered.setdefault(value, latents), latents)
            engine.require_no_leak()
            results = [engine.results[number] for number in numbers]
            asked += zip(chats, sampling, results)
            cuts = [draw.choice([None, None, -5]) for _ in chats]
            chats = [
                ([*text, *done.tokens[:cut], 1, 2], salt)
                for (text, salt), done, cut in zip(chats, results, cuts)
            ]
        assert engine.statistics.prefix_blocks and engine.statistics.evicted
    alone = engine_of(
        parity, prompt_logprobs=True, blocks=60, max_requests=len(asked), step_tokens=256
    )
    expected = alone.generate([c[0] for c, _, _ in asked], [s for _, s, _ in asked])
    for (_, _, done), whole in zip(asked, expected, strict=True):
        count = len(done.tokens)
        for name in ("tokens", "log_probs", "top_log_probs"):
            assert getattr(done, name) == getattr(whole, name)[:count]
        if done.tokens:  # or it was aborted before
            assert done.prompt_log_probs == whole.prompt_log_probs
    fresh, found = engine_of(parity, step_tokens=256, **KEPT), {}
    for (text, salt), _, done in asked:
        whole = [*text, *done.tokens]
        with fresh:
            fresh.add_request(whole, Request(whole, 1).sampling(), salt)
            step_to_the_end(fresh)
            found |= contents(fresh)
    assert len(registered) > 8
    for value, latents in registered.items():
        assert torch.equal(latents, found[value])
