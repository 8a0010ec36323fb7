"""What is chosen for a model: shared caches, tokens of a step, steps in one CUDA graph."""

import logging
from types import SimpleNamespace

import pytest

from absorbed_mla.log_once import times_logged
from absorbed_mla.serving.executor import engine_options
from absorbed_mla.serving.executor.live_model import runner_of
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.scheduler import prefill_graphs
from tests.support.engine import generating_model

REFUSED = ValueError("tensor_parallel_size is 1")


@pytest.fixture
def chosen(monkeypatch, caplog):
    """What is chosen for so much room, and the logged reason."""
    model = generating_model(num_layers=1)
    monkeypatch.setattr(engine_options, "require_shared_cache", lambda model, drafts: None)

    def choose(room, **options):
        asked = []
        monkeypatch.setattr(
            engine_options, "_fitting_tokens", lambda model, given: asked.append(given) or room
        )
        given = LLMOptions(**{"decode_context_parallel": "auto", "max_num_seqs": 10, **options})
        times_logged.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.INFO, engine_options.logger.name):
            found = engine_options._with_sharing_chosen(model, given, 128)
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

    monkeypatch.setattr(engine_options, "require_shared_cache", refuse)
    shared, logged = chosen(0)
    assert shared is False and str(REFUSED) in logged


def test_nothing_says_what_fits(chosen):
    assert chosen(None)[0] is False


def test_other_options_take_it():
    LLMOptions(decode_context_parallel="auto", parity=True)
    LLMOptions(decode_context_parallel="auto", data_parallel_attention=True)
    with pytest.raises(ValueError, match="must be one of False, True, auto, got 'yes'"):
        LLMOptions(decode_context_parallel="yes")


@pytest.fixture
def captured(monkeypatch):
    """A model that is built for CUDA graphs, as if there were a GPU for them."""
    gpu = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))
    monkeypatch.setattr(prefill_graphs, "torch", gpu)
    monkeypatch.setattr(prefill_graphs, "find_spec", lambda name: None)
    model = generating_model(num_layers=1, mtp_num_layers=1)
    model.config.cuda_graph_impl = "local"
    return model


def graph_tokens(model, **options) -> tuple[int, bool]:
    """Of the engine's options, and whether Megatron captures such steps; equal for a live model."""
    given = LLMOptions(**{"cuda_graphs": True, **options})
    sizes = engine_options.engine_options(model, given, 128, None)
    runner, _ = runner_of(model, None, {"cuda_graphs": True, "max_model_len": 128, **options})
    assert runner.options().prefill_graph_tokens == sizes.prefill_graph_tokens
    host = sizes.to_host(model.config, 1, 1)
    theirs = host.num_cuda_graphs is not None and host.use_cuda_graphs_for_non_decode_steps
    return sizes.prefill_graph_tokens, theirs


@pytest.mark.parametrize(
    ("options", "tokens"), [({}, 120 + 8), ({"num_speculative_tokens": 2}, 120 + 3 * 8)]
)
def test_prompts_fill_a_step_beside_running_requests(options, tokens):
    given = LLMOptions(max_num_batched_tokens=120, max_num_seqs=8, **options)
    assert given.engine_options(128, None, None).step_tokens == tokens


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 1536),
        ({"max_num_batched_tokens": 8192}, 1536),
        ({"max_num_batched_tokens": 500, "max_num_seqs": 12}, 512),
        ({"prefill_graph_tokens": 64}, 64),
        ({"prefill_graph_tokens": 2048}, 2048),
        ({"prefill_graph_tokens": 0}, 0),
        ({"num_speculative_tokens": 1}, 0),
        ({"decode_context_parallel": "auto"}, 1536),
    ],
)
def test_tokens_of_graphs_of_prompts(captured, options, tokens):
    """Megatron's graphs, one for each layer, are captured where there are no others."""
    assert graph_tokens(captured, **options) == (tokens, not tokens)


def test_graphs_of_prompts_need_graphs(captured):
    assert graph_tokens(captured, cuda_graphs=False) == (0, False)
    with pytest.raises(ValueError, match="prefill_graph_tokens needs cuda_graphs=True, got False"):
        graph_tokens(captured, cuda_graphs=False, prefill_graph_tokens=64)


def test_graphs_of_prompts_go_without_a_shared_cache(captured, monkeypatch):
    monkeypatch.setattr(engine_options, "require_shared_cache", lambda model, drafts: None)
    monkeypatch.setattr(engine_options, "_fitting_tokens", lambda model, given: 64)
    given = LLMOptions(cuda_graphs=True, decode_context_parallel="auto")
    sizes = engine_options.engine_options(captured, given, 128, None)
    assert sizes.decode_context_parallel and sizes.prefill_graph_tokens == 0


def test_models_without_graphs_of_prompts(captured, monkeypatch):
    """An explicit number stays; the engine logs that it has none."""
    monkeypatch.setattr(prefill_graphs, "indexers", lambda model: ["sparse"])
    assert graph_tokens(captured) == (0, True)
    assert graph_tokens(captured, prefill_graph_tokens=64) == (64, False)
    assert LLMOptions(cuda_graphs=True, data_parallel_attention=True).prefill_graph_tokens is None
