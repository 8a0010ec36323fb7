"""decode_context_parallel="auto": ranks share the cache where not all requests fit otherwise."""

from __future__ import annotations

import logging

import pytest

from absorbed_mla.llm import cache_size
from absorbed_mla.llm.options import LLMOptions
from absorbed_mla.log_once import times_logged
from tests.support.engine import generating_model

REFUSED = ValueError("tensor_parallel_size is 1")


@pytest.fixture
def chosen(monkeypatch, caplog):
    """What is chosen for so much room, and the logged reason."""
    model = generating_model(num_layers=1)
    monkeypatch.setattr(cache_size, "require_shared_cache", lambda model, drafts: None)

    def choose(room, **options):
        asked = []
        monkeypatch.setattr(
            cache_size, "_fitting_tokens", lambda model, given: asked.append(given) or room
        )
        given = LLMOptions(**{"decode_context_parallel": "auto", "max_num_seqs": 10, **options})
        times_logged.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.INFO, cache_size.logger.name):
            found = cache_size._with_sharing_chosen(model, given, 128)
        assert all(one.decode_context_parallel is False for one in asked)
        return found.decode_context_parallel, caplog.text

    return choose


def test_by_what_fits(chosen):
    shared, why = chosen(1279)
    assert shared is True and "do not fit on each rank" in why
    shared, why = chosen(1280)
    assert shared is False and "fit on each rank" in why
    assert chosen(1279, max_model_len=64)[0] is False, "requests are shorter"


def test_explicit_choices_stay(chosen):
    for value in (True, False):
        assert chosen(0, decode_context_parallel=value) == (value, "")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"host_cache_tokens": 64}, "host_cache_tokens needs all latents"),
        ({"prefix_cache_dir": "cached"}, "prefix_cache_dir needs all latents"),
    ],
)
def test_what_needs_whole_latents(chosen, options, why):
    shared, logged = chosen(0, **options)
    assert shared is False and why in logged


def test_what_cannot_be_shared(chosen, monkeypatch):
    def refuse(model, drafts):
        raise REFUSED

    monkeypatch.setattr(cache_size, "require_shared_cache", refuse)
    shared, logged = chosen(0)
    assert shared is False and str(REFUSED) in logged


def test_nothing_says_what_fits(chosen):
    assert chosen(None)[0] is False


def test_other_options_take_it():
    LLMOptions(decode_context_parallel="auto", parity=True)
    LLMOptions(decode_context_parallel="auto", data_parallel_attention=True)
    with pytest.raises(ValueError, match="must be one of False, True, auto, got 'yes'"):
        LLMOptions(decode_context_parallel="yes")
