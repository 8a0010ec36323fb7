"""On a Megatron with other names, generation goes on, or an error says which one is missing."""

import importlib
import logging
import re
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch
from megatron.core import __version__
from megatron.core.inference.contexts import DynamicInferenceContext

from absorbed_mla import cpu_host, megatron_names
from absorbed_mla.batch_invariant import enable_batch_invariant_mode
from absorbed_mla.batch_invariant import megatron_operators as operators
from absorbed_mla.deepseek_router import _routing_with
from absorbed_mla.inference.decode_context_parallel.context import decode_context_parallel_context
from absorbed_mla.log_once import times_logged
from absorbed_mla.megatron_names import MegatronName, Need
from absorbed_mla.muon import optimizer_hook
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.packed_roll import require_packed_roll
from absorbed_mla.packed_router import PackedRouter
from absorbed_mla.router_replay import decoder_routers
from absorbed_mla.serving.cpu_engine import enable_cpu_inference
from absorbed_mla.serving.megatron_engine import names
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.sampling.sampler import RequestSampler
from absorbed_mla.serving.scheduler.conditions import overlap_scheduler
from absorbed_mla.serving.structured_output.vocabulary import TokenVocabulary
from absorbed_mla.serving.weights import fused_swiglu
from absorbed_mla.serving.weights.fused_residuals import fuse_residuals
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from tests.support import needs
from tests.support.dsa_models import generating_fields
from tests.support.engine import KEPT, engine_of, generating_model, prompt
from tests.support.megatron_names import ALL_NEEDS, owner_of, record_accesses, take_away, words_of

GREEDY = SamplingParams(max_tokens=3, temperature=0, stop_token_ids=(64, 65))
PROMPTS = [prompt(9, 1), prompt(62, 2)]


@pytest.fixture(scope="module")
def expected(model):
    return engine_of(model, decode_loop=False).generate(PROMPTS, GREEDY)


@pytest.fixture(autouse=True)
def _logs_anew():
    times_logged.cache_clear()


def rows(*of: Need):
    return [
        pytest.param(need, name, id=f"{need.what}-{name.name}")
        for need in of
        for name in need.names
    ]


# What each need refuses to do without one of its names.
def _engine(**options) -> Callable[[], object]:
    return lambda: engine_of(generating_model(num_layers=1), **options)


def _drafting() -> object:
    model = generating_model(num_layers=1, mtp_num_layers=1)
    return engine_of(model, num_speculative_tokens=1)


def _sparse() -> object:
    return engine_of(generating_model(**generating_fields()))


def _generate() -> object:
    return engine_of(generating_model(num_layers=1)).generate(PROMPTS[:1], GREEDY)


def _gpt_builder() -> object:
    gpt = importlib.import_module(megatron_names.BUILDER)
    from specs.absorbed_mla_gpt_builder import AbsorbedMLAGPTModelBuilder

    config = SimpleNamespace(transformer_layer_spec=get_absorbed_mla_decoder_block_spec)
    return AbsorbedMLAGPTModelBuilder(config) and gpt


REFUSING = {
    names.ANY_ENGINE: _engine(),
    names.PRIORITIES: _engine(scheduling_policy="priority"),
    names.PREFIX_CACHING: _engine(prefix_caching=True),
    names.PREFIX_CACHE_DIR: _engine(prefix_caching=True, prefix_cache_dir="x"),
    names.DRAFTS: _drafting,
    names.TOKEN_RECORDS: _engine(enable_return_routed_experts=True),
    names.STRUCTURED_OUTPUTS: lambda: _engine()().set_vocabulary(TokenVocabulary((b"a",))),
    names.DRAFTS_ON_CPUS: enable_cpu_inference,
    megatron_names.GENERATION: _generate,
    megatron_names.INDEX_KEYS: _sparse,
    megatron_names.DECODE_CONTEXT_PARALLEL: lambda: decode_context_parallel_context(None, None),
    megatron_names.KV_OFFLOAD: _engine(host_cache_tokens=640, blocks=20),
    megatron_names.KV_OFFLOAD_MEMORY: _engine(host_cache_tokens=640, blocks=20),
    megatron_names.KV_OFFLOAD_STEPS: _engine(host_cache_tokens=640, blocks=20),
    megatron_names.PACKED_MTP: require_packed_roll,
    megatron_names.EXPERT_BIAS_OF_PACKS: lambda: PackedRouter(
        SimpleNamespace(moe_router_enable_expert_bias=True)
    ),
    megatron_names.CHOICE_OF_EXPERTS: lambda: _routing_with(AbsorbedMLAOptions()),
    megatron_names.ROUTER_REPLAY: lambda: decoder_routers(generating_model(), "it"),
    megatron_names.GPT_BUILDER: _gpt_builder,
    operators.SUMS: lambda: enable_batch_invariant_mode("cpu"),
    operators.TENSOR_PARALLEL_PARTS: lambda: enable_batch_invariant_mode("cpu", 2),
}
# Each of the others has a test of its own.
GOING_ON = (
    names.OVERLAP_SCHEDULER,
    names.NO_TEXTS,
    names.RESUMING,
    names.EVICTABLE_BLOCKS,
    names.FULL_CUDA_GRAPHS,
    names.FUSED_SWIGLU,
    names.FUSED_RESIDUALS,
    megatron_names.CPU_HOST,
    megatron_names.MUON,
    operators.GPU_OPERATORS,
)


# In the log.
SAYS = {
    names.OVERLAP_SCHEDULER: "all steps run by Megatron's scheduler",
    names.RESUMING: "Megatron resumes paused requests by its own rule",
    names.NO_TEXTS: "Megatron makes texts of requests that have ended",
}


def test_every_need_has_a_test():
    assert {*REFUSING, *GOING_ON} == {*ALL_NEEDS}
    assert all(need.without == megatron_names.REFUSED for need in REFUSING)
    assert all(need.without != megatron_names.REFUSED for need in GOING_ON)


@pytest.mark.parametrize(("need", "name"), rows(*ALL_NEEDS))
def test_this_release_has_it(need, name):
    """If it is one of those that the table names, and only then."""
    release = ".".join(__version__.split(".")[:2])
    assert release in megatron_names.EVERY
    owner = _imported(name)
    if isinstance(owner, ModuleType):
        found = hasattr(owner, name.name)
    else:
        found = any(name.name in words_of(cls) for cls in owner.__mro__)
    assert found == (release in name.versions)


def _imported(name: MegatronName) -> type | ModuleType:
    if name.owner == megatron_names.BUILDER:
        pytest.importorskip(name.owner, exc_type=ImportError)
    return owner_of(name)


@pytest.mark.parametrize(("need", "name"), rows(*REFUSING))
def test_what_nothing_replaces_is_refused(need, name, monkeypatch):
    if name.name == "forward":
        pytest.skip("every module has one")
    if need is names.DRAFTS_ON_CPUS and needs.HAS_GPU:
        pytest.skip(needs.NEEDS_NO_GPU)
    _imported(name)
    take_away(monkeypatch, name)
    missing = rf"{need.what} cannot run: megatron-core \S+ has no \S+\.{name.name} \(.* it\)"
    with pytest.raises(ValueError, match=f"^{re.escape(need.what)}{missing[len(need.what) :]}$"):
        REFUSING[need]()


@pytest.mark.parametrize(
    ("need", "name"), rows(names.OVERLAP_SCHEDULER, names.RESUMING, names.NO_TEXTS)
)
def test_generation_goes_on(model, expected, need, name, monkeypatch, caplog):
    """By Megatron's own steps; the log says why, once, and who has asked for others is told."""
    take_away(monkeypatch, name)
    with caplog.at_level(logging.INFO, logger="absorbed_mla"):
        engine = engine_of(model)
        engine_of(model)
    said = [one for one in caplog.messages if f".{name.name} (" in one]
    assert sum(SAYS[need] in one for one in said) == 1
    if need is names.OVERLAP_SCHEDULER:
        assert engine.scheduler is None
    assert engine.generate(PROMPTS, GREEDY) == expected
    if need is names.OVERLAP_SCHEDULER:
        with pytest.raises(ValueError, match=rf"decode_loop=True cannot run: .*\.{name.name} "):
            engine_of(model, decode_loop=True)


@pytest.mark.parametrize("options", [KEPT, {"prefix_caching": True}], ids=["parents", "none"])
def test_evictable_blocks_are_counted_by_parents(model, options):
    allocator = engine_of(model, **options).host.context.kv_block_allocator
    there = hasattr(allocator, names.PARENTS.name)
    assert there == (options is KEPT and names.PARENTS.versions == (__version__[:4],))
    assert (names.EVICTABLE.name in vars(allocator)) == there


def test_one_that_other_options_rule_out(model):
    with pytest.raises(ValueError, match="decode_loop=True cannot run: async_sched_mode"):
        engine_of(model, decode_loop=True, inference_config={"async_sched_mode": "async"})


@pytest.mark.parametrize(("need", "name"), rows(names.FUSED_RESIDUALS, names.FUSED_SWIGLU))
def test_layers_stay_as_they_are(model, need, name, monkeypatch, caplog):
    monkeypatch.setattr(fused_swiglu, "_is_plain_swiglu", lambda config: True)
    residuals = need is names.FUSED_RESIDUALS
    owner = model.decoder.layers[0] if residuals else model.decoder.layers[0].mlp
    own = owner.__dict__.pop(name.name)
    try:
        with caplog.at_level(logging.INFO, logger="absorbed_mla"):
            (fuse_residuals if residuals else fused_swiglu.fuse_swiglu)(model)
        [said] = caplog.messages
        assert f".{name.name} (" in said
        assert not hasattr(owner, name.name)
    finally:
        setattr(owner, name.name, own)


@pytest.mark.parametrize("there", [True, False])
def test_graphs_of_whole_steps(model, there, monkeypatch, caplog):
    """They cannot hold those of layers, which are left out by their name."""
    engine = engine_of(model, num_cuda_graphs=2)
    monkeypatch.setattr(model.config, "cuda_graph_impl", "local")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if not there:
        take_away(monkeypatch, names.LAYER_GRAPHS)
    with caplog.at_level(logging.INFO, logger="absorbed_mla"):
        scheduler = overlap_scheduler(
            engine.host, model, RequestSampler(), engine.options, lockstep=False
        )
    assert (scheduler.runner.graphs is not None) == there
    said = [one for one in caplog.messages if f".{names.LAYER_GRAPHS.name} (" in one]
    assert len(said) == (not there)


@pytest.mark.parametrize(("need", "name"), rows(megatron_names.CPU_HOST))
def test_a_function_that_is_not_there_is_not_replaced(need, name, monkeypatch, caplog):
    take_away(monkeypatch, name)
    with caplog.at_level(logging.INFO, logger="absorbed_mla"):
        cpu_host._replace(name, lambda *args: None)
    assert not hasattr(owner_of(name), name.name)
    [said] = caplog.messages
    assert f".{name.name} (" in said


def test_muon_follows_no_marks(monkeypatch):
    """``test_muon.py`` has what becomes of it."""
    take_away(monkeypatch, megatron_names.MUON_REGISTRY)
    why = optimizer_hook._follow_in_megatron()
    assert why is not None and megatron_names.MUON_REGISTRY.name in why


@pytest.mark.parametrize(("need", "name"), rows(operators.GPU_OPERATORS))
def test_an_operator_of_another_name_stays_megatrons(need, name, monkeypatch):
    take_away(monkeypatch, name)
    try:
        operators.enable({name: object()})
        assert not hasattr(owner_of(name), name.name)
    finally:
        operators.disable()


# What the package itself keeps on Megatron's objects.
OWN = {
    *("_host_blocks", "_staged_blocks", "_allocate_offloaded", "tiers"),
    *("cache_ranks", "token_shares", "latent_forward", "reads_whole_prompts", "index_keys"),
    *("returned_choices", "cascade"),
}
SCORED = SamplingParams(max_tokens=4, temperature=1, logprobs=2, prompt_logprobs=1)
LONG = SamplingParams(max_tokens=70, temperature=0)
ENGINES = {
    "whole prompts": {},
    "chunks": {"chunked_prefill": True, "step_tokens": 64, "prefix_caching": True},
    "paused and evicted": {"blocks": 7, "paused_blocks": 2},
    "a folder": {"prefix_caching": True, "prefix_cache_dir": "prefixes", "blocks": 8},
    "host memory": {"host_cache_tokens": 640, "blocks": 20},
    "sizes of graphs": {"num_cuda_graphs": 2},
    "drafts": {"num_speculative_tokens": 1},
    "experts": {"enable_return_routed_experts": True},
}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_the_tables_have_all_that_is_used(options, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    known = {name for need in ALL_NEEDS for name in need.names}
    used = record_accesses(monkeypatch)
    drafts = 1 if "num_speculative_tokens" in options else None
    experts = {"num_moe_experts": 4} if "enable_return_routed_experts" in options else {}
    model = generating_model(num_layers=1, mtp_num_layers=drafts, **experts)
    engine = engine_of(model, **options)
    prompts = [prompt(60, seed, shared=30) for seed in range(5)]
    sampling = [LONG, LONG if drafts else SCORED, LONG, GREEDY, LONG]
    with engine:
        for one, params in zip(prompts, sampling):
            engine.add_request(one, params)
        engine.step()
        engine.abort(2)
        while engine.is_busy():
            engine.step()
    engine.require_no_leak()
    for owner, found in used.items():
        listed = {one.name for one in known if one.owner.endswith(f".{owner.__name__}")}
        listed |= {one.or_else for one in known if one.or_else}
        assert {name for name in found if not name.startswith("__")} <= listed | OWN, owner
    assert len(used[DynamicInferenceContext]) > 30
