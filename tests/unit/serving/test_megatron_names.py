"""With private names of another Megatron, generation goes on, or says what is missing."""

from __future__ import annotations

import logging

import pytest

from absorbed_mla.log_once import times_logged
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.scheduler import conditions
from tests.support.engine import engine_of, generating_model, prompt
from tests.support.renamed import rename

GREEDY = SamplingParams(max_tokens=3, temperature=0, stop_token_ids=(64, 65))
PROMPTS = [prompt(9, 1), prompt(62, 2)]
OF_LOOP = sorted(
    {
        name
        for names in (
            conditions._HOST,
            conditions._CONTEXT,
            conditions._VIEW,
            conditions._ALLOCATOR,
            conditions._CONTROLLER,
        )
        for name in names
        if name.startswith("_")
    }
    # No step runs without these.
    - {"_sampling", "_prefix_cache_blocks_matched"}
)


@pytest.fixture(scope="module")
def model():
    return generating_model(num_layers=1)


@pytest.fixture(scope="module")
def expected(model):
    return engine_of(model, decode_loop=False).generate(PROMPTS, GREEDY)


@pytest.mark.parametrize("name", OF_LOOP)
def test_generation_goes_on(model, expected, name, monkeypatch, caplog):
    """By Megatron's own steps; the log says why."""
    times_logged.cache_clear()
    rename(monkeypatch, name)
    with caplog.at_level(logging.INFO, logger="absorbed_mla"):
        engine = engine_of(model)
    assert engine.decode_loop is None
    [said] = [one for one in caplog.messages if "decode loop" in one]
    assert said.startswith("all steps run by Megatron's scheduler") and f".{name}" in said
    assert engine.generate(PROMPTS, GREEDY) == expected


def test_an_explicit_decode_loop_is_refused(model, monkeypatch):
    rename(monkeypatch, "_run_coroutine_sync")
    with pytest.raises(ValueError, match=r"decode_loop=True cannot run: .*_run_coroutine_sync"):
        engine_of(model, decode_loop=True)


def test_one_that_other_options_rule_out(model):
    with pytest.raises(ValueError, match="decode_loop=True cannot run: async_sched_mode"):
        engine_of(model, decode_loop=True, inference_config={"async_sched_mode": "async"})


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("_sampling", {}, "Engine"),
        ("_add_request", {}, "Engine"),
        ("resume_paused_requests", {}, "Engine"),
        ("evict_overflow_paused_requests", {}, "Engine"),
        ("_prefix_cache_blocks_matched", {}, "Engine"),
        ("register_kv_block_hashes", {"prefix_caching": True}, "prefix_caching=True"),
        ("_deregister_blocks", {"prefix_caching": True, "prefix_cache_dir": "x"}, "prefix_cache_"),
        ("_find_kv_match_count", {"prefix_caching": True, "prefix_cache_dir": "x"}, "prefix_cac"),
        ("_allocate_memory_buffer", {"host_cache_tokens": 640, "blocks": 20}, "host_cache_tok"),
        ("initialize_attention_state", {"host_cache_tokens": 640, "blocks": 20}, "host_cache_tok"),
    ],
)
def test_what_nothing_replaces_is_named(model, name, options, what, monkeypatch):
    rename(monkeypatch, name)
    with pytest.raises(ValueError, match=rf"^{what}\S* cannot run: megatron-core .*\.{name}$"):
        engine_of(model, **options)


@pytest.mark.parametrize(
    "name", ["_spec_tokens_proposed_per_pos", "_check_stop_words_for_request_post_append"]
)
def test_drafts(monkeypatch, name):
    """What counts them, and what ends a request among them."""
    rename(monkeypatch, name)
    with pytest.raises(ValueError, match=rf"num_speculative_tokens cannot run: .*\.{name}"):
        engine_of(generating_model(num_layers=1, mtp_num_layers=1), num_speculative_tokens=1)
