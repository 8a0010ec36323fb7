"""Steps without Megatron's scheduler leave, one after the other, what its own steps leave.

Two engines get the same requests, one with the overlap scheduler and one without. After every step
their reports, Megatron's tables, the blocks and their latents are compared, bit by bit.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.serving.sampling.device_sampler import Kind
from absorbed_mla.serving.scheduler import requests
from absorbed_mla.serving.scheduler.full_cuda_graphs import (
    FullCudaGraphs,
    _without_layer_graphs,
    clear_all,
)
from tests.oracle_dsa import OracleDSA
from tests.support.cases import TINY
from tests.support.combinations import without
from tests.support.dsa_models import generating_fields
from tests.support.engine import KEPT, engine_of, generating_model, prompt, step_to_the_end
from tests.support.models import MIXED as EXPERTS
from tests.support.overlap_scheduler import (
    CASES,
    GREEDY,
    check,
    check_ahead,
    count_in_flight,
    parity_model,
)


@pytest.fixture(scope="module")
def invariant():
    return parity_model(num_layers=1)


# To which one of the two ways adds nothing, on a CPU.
_OF_STEPS = {"until-the-end-of-the-context", "sampled", "filtered", "penalties", "biases", "prefix"}
_OF_STEPS |= {"log-probs", "all-log-probs", "top-log-probs", "top-log-probs-in-parts", "evicted"}
_OF_STEPS |= {"prompt-log-probs", "blocks", "blocks-one-by-one", "different-ends", "min-tokens"}
_AHEAD = {"waiting-for-rows-and-blocks", "whole-prompts", "added-in-every-step", "one-token"}
_AHEAD |= {"one-token-each", "ends-together", "ends-together-for-blocks", "top-log-probs-later"}
_AHEAD |= {"stopped-beside-prompts", "penalties-later", "counting-tokens-later", "equal-sizes"}
_AHEAD |= {"aborted-waiting", "waiting", "parts-of-prompts"}
# Others hold what these do.
_HELD = ("greedy", "all-log-probs", "blocks", "prefix", "waiting", "waiting-for-blocks", "added")


@pytest.mark.parametrize("name", without(CASES, *_AHEAD, *_HELD[:4]))
def test_same_steps(model, name):
    check(model, CASES[name])


@pytest.mark.parametrize("name", without(CASES, *_OF_STEPS, *_HELD))
def test_launched_ahead(invariant, name):
    """Each step before the tokens of the one before it are known, as on a GPU."""
    with batch_invariant_mode():
        check_ahead(invariant, CASES[name])


@pytest.mark.parametrize(("name", "kinds"), [("everything", 1), ("graphs", 3)])
def test_padded_steps(invariant, name, kinds, monkeypatch):
    """A step that is kept, and run again with other numbers, as a graph is."""
    monkeypatch.setattr(
        FullCudaGraphs, "_captured", lambda self, step, larger: SimpleNamespace(replay=step)
    )
    graphs = FullCudaGraphs(invariant)
    with batch_invariant_mode():
        check_ahead(invariant, CASES[name], graphs=graphs)
    found = {kind for _, kind in graphs._graphs}
    assert found <= set(Kind) and len(found) >= kinds
    clear_all()
    assert not graphs._graphs


def test_aborted_while_its_prompt_is_read(model):
    """By a step that was launched ahead; the others go on."""
    engine = engine_of(model)
    engine.scheduler.launches_ahead = True
    expected = engine.generate([prompt(20), prompt(30)], GREEDY)
    _, joined = count_in_flight(engine)
    with engine:
        numbers = [engine.add_request(prompt(length), GREEDY) for length in (20, 30)]
        for _ in range(3):
            engine.step()
        late = engine.add_request(prompt(40), GREEDY)
        engine.step()
        assert joined == [1]
        engine.abort(late)
        step_to_the_end(engine)
        assert [engine.results[number] for number in numbers] == expected
        assert engine.results[late].finish == "abort" and not engine.results[late].tokens
        engine.require_no_leak()


BURSTS = {"blocks": 40, "chunked_prefill": True, "step_tokens": 192, "max_requests": 32}


def prompts_read(engine, prompts) -> list[int]:
    """How many of these prompts each step reads, until all requests have ended."""
    engine.scheduler.launches_ahead = True
    for text in prompts:
        engine.add_request(text, GREEDY)
    read = []
    while engine.is_busy():
        engine.step()
        read.append(engine.scheduler.last.sizes.prefill_req_count)
    return read


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        # A quarter of what waits, at least 90 of 192 tokens, and the rest where it fits.
        ([40] * 16, [4, 3, 2, 2, 2, 3]),
        ([40] * 4, [4]),
        # One fills a quarter of 480 by less than three quarters, then 90 by more.
        ([80] * 6, [2, 1, 1, 2]),
    ],
)
def test_prompts_of_a_burst(model, lengths, expected, monkeypatch):
    """How many of them each step reads: first tokens come sooner by shorter steps."""
    monkeypatch.setattr(requests, "_AT_LEAST", 90)
    engine = engine_of(model, **BURSTS)
    with engine:
        read = prompts_read(engine, [prompt(length, i) for i, length in enumerate(lengths)])
    assert [count for count in read if count] == expected
    assert engine.host.context.step_count == len(read)


@pytest.mark.parametrize(("cached", "expected"), [(True, [2, 2, 1]), (False, [1, 1, 1, 2])])
def test_prompts_that_are_cached(model, cached, expected, monkeypatch):
    """Steps are shortened by what has to be computed: here 8 of 72 tokens, or all of them."""
    monkeypatch.setattr(requests, "_AT_LEAST", 90)
    engine = engine_of(model, **BURSTS, **KEPT)
    shared = 64 if cached else 0
    with engine:
        engine.generate([prompt(72, 9, shared)], GREEDY)
        read = prompts_read(engine, [prompt(72, i, shared) for i in range(5)])
    assert [count for count in read if count] == expected


def test_time_to_the_first_token(model):
    """Megatron's record of a request says how long its first token took, as in its own steps."""
    engine = engine_of(model)
    engine.scheduler.launches_ahead = True
    with engine:
        engine.add_request(prompt(20), GREEDY)
        engine.step()
        late = engine.add_request(prompt(40), GREEDY.replace(max_tokens=1))
        records = [entry.record for entry in engine.host.requests.values()]
        step_to_the_end(engine)
        assert all(0 < record[-1].ttft < 60 for record in records)
        assert len(records) == 2 and late in engine.results


def test_layers_run_without_graphs_of_their_own():
    """Inside of a capture; afterwards they have them again."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].cudagraph_manager = manager = nn.Identity()
    vars(model[1])["cudagraph_manager"] = None
    with _without_layer_graphs(model):
        assert not any(hasattr(layer, "cudagraph_manager") for layer in model)
    assert model[0].cudagraph_manager is manager and model[1].cudagraph_manager is None


@pytest.mark.parametrize("name", ["weight", "expert_bias"])
def test_graphs_of_weights_that_move(name):
    """Also of buffers, such as the router's bias of experts."""
    model = nn.Linear(2, 2)
    model.register_buffer("expert_bias", torch.zeros(2))
    graphs = FullCudaGraphs(model)
    graphs.keep_if_weights_stay()
    graphs._graphs["step"] = None
    tensor = getattr(model, name)
    tensor.data.add_(1)
    graphs.keep_if_weights_stay()
    assert graphs._graphs
    tensor.data = tensor.data.clone()
    graphs.keep_if_weights_stay()
    assert not graphs._graphs


FP8 = AbsorbedMLAOptions(latent_cache_dtype="fp8")
MODELS = {
    "parity": lambda: parity_model(num_layers=1),
    "fp8": lambda: generating_model(FP8, num_layers=1),
    "sparse": lambda: generating_model(
        **generating_fields(OracleDSA(mla=TINY, heads=2, width=16, topk=24))
    ),
    "experts": lambda: generating_model(**EXPERTS),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    with batch_invariant_mode() if name == "parity" else nullcontext():
        check(MODELS[name](), CASES["everything"])


@pytest.mark.parametrize(
    "options",
    [
        {"decode_loop": False},
        {"inference_config": {"async_sched_mode": "async"}},
        {"host_cache_tokens": 640, "cache_tokens": 1920},
        {"num_speculative_tokens": 1},
    ],
)
def test_left_to_megatron(drafting, options):
    assert engine_of(drafting, **options).scheduler is None


def test_stopped_in_the_middle(model):
    engine, other = engine_of(model), engine_of(model, decode_loop=False)
    with engine:
        engine.add_request(prompt(20), GREEDY)
        for _ in range(4):
            engine.step()
    assert engine.generate([prompt(30)], GREEDY) == other.generate([prompt(30)], GREEDY)
