"""Selections of an engine's requests in the training forward of their texts.

In fp64: prompts read in chunks, requests side by side, and some that lose their blocks.
"""

from __future__ import annotations

import pytest
import torch

from absorbed_mla.dsa.replay import record_selections, replay_selections
from absorbed_mla.dsa.request_selections import RequestSelections, training_selections
from absorbed_mla.serving.selections import record_request_selections
from tests.support import world
from tests.support.dsa_models import DSA, generating_fields
from tests.support.engine import (
    CHUNKED,
    Request,
    add,
    engine_of,
    generate,
    generating_model,
    prompt,
    step_to_the_end,
)
from tests.support.layouts import packed
from tests.support.refusal import refusal
from tests.support.rollout import Rollout

# The last one has no choice: two tokens go through the model.
REQUESTS = [Request(prompt(n, n), 8) for n in (60, 70, 61, 130, 63, 5)] + [Request(prompt(2, 9), 1)]
CROWDED = {**CHUNKED, "blocks": 5}
TOKENS = 140


def roll_out(model, requests=REQUESTS, **options) -> Rollout:
    engine = engine_of(model, **options)
    with record_request_selections(engine) as recorder:
        run = generate(engine, requests)
    if options:
        assert run.statistics.chunks and run.statistics.evicted and run.statistics.mixed_steps
    taken = [recorder.take(number) for number in range(len(requests))]
    texts = [[*request.prompt, *tokens] for request, tokens in zip(requests, run.tokens)]
    return Rollout(model, texts, taken)


def model_of(**changes):
    fields = generating_fields(init_method_std=0.4, **changes)
    return generating_model(dtype=torch.float64, **fields)


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    return roll_out(model_of(), **CROWDED)


LAYOUTS = ("sbhd", "thd", "thd_padded")


def noisy(model):
    """The model with other indexers."""
    other = model_of()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "indexer" in name:
                parameter.copy_(torch.randn_like(parameter))
    return other


def test_records(rollout):
    """All tokens but the last of each text; int32, on layers with an indexer."""
    for text, request in zip(rollout.texts, rollout.requests):
        assert request.num_tokens == len(text) - 1
        assert len(request.chosen) == 2
        for rows in request.chosen.values():
            if request.num_tokens <= DSA.topk:
                assert rows is None
                continue
            assert (rows.dtype, rows.shape) == (torch.int32, (len(text) - 1, DSA.topk))
            last = torch.arange(len(text) - 1)
            assert (rows.amax(-1) <= last).all()
            assert ((rows >= 0).sum(-1) == (last + 1).clamp(max=DSA.topk)).all()
    assert sum(None in one.chosen.values() for one in rollout.requests) == 1


def test_paused_requests(rollout):
    """They keep their blocks, and are not among those of a step."""
    engine = engine_of(rollout.model, **CROWDED, paused_blocks=1)
    with record_request_selections(engine) as recorder:
        assert generate(engine, REQUESTS).statistics.most_paused
    for number, expected in enumerate(rollout.requests):
        torch.testing.assert_close(recorder.take(number).chosen, expected.chosen, rtol=0, atol=0)


def test_prefilled_again():
    """The later selections count: here they are another indexer's."""
    engine = engine_of(model_of(), **CROWDED)
    with record_request_selections(engine) as recorder, engine:
        add(engine, REQUESTS)
        while not engine.statistics.evicted:
            engine.step()
        [number, *_] = engine.host.waiting_request_ids
        engine.model.load_state_dict(noisy(engine.model).state_dict())
        results = step_to_the_end(engine)
        text = [*REQUESTS[number].prompt, *results[number].tokens]
    found = Rollout(engine.model, [text], [recorder.take(number)])
    with record_selections(engine.model) as own:
        found.forward(TOKENS)
    for name, rows in found.requests[0].chosen.items():
        assert torch.equal(rows, own[name][0][: len(rows), 0].cpu())


@pytest.mark.parametrize("name", LAYOUTS)
def test_as_the_training_forward_chooses(rollout, name):
    layout = rollout.layouts(TOKENS)[name]
    with record_selections(rollout.model) as own:
        rollout.forward(layout)
    for layer, [found] in rollout.laid_out(training_selections, layout).items():
        expected = own[layer][0].cpu()
        assert found.shape == expected.shape
        recorded = (found >= 0).any(-1)
        assert torch.equal(found[recorded], expected[recorded])
        assert recorded.sum() == sum(len(text) - 1 for text in rollout.texts)


@pytest.mark.parametrize("name", LAYOUTS)
def test_other_indexers(rollout, name):
    """Probabilities and gradients are those of the model that sampled."""
    layout = rollout.layouts(TOKENS)[name]
    expected = rollout.forward(layout)
    other = noisy(rollout.model)
    assert not torch.allclose(rollout.forward(layout, model=other), expected, atol=1e-2)
    with replay_selections(other, rollout.laid_out(training_selections, layout)):
        found = rollout.forward(layout, model=other)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = []
    for model, log_probs in ((rollout.model, expected), (other, found)):
        parameters = [p for n, p in model.named_parameters() if "indexer" not in n]
        gradients.append(torch.autograd.grad(log_probs.sum(), parameters))
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-11)


def test_learning_after_replay(rollout):
    """The indexer learns from recorded tokens; the others add 0 to its mean over all tokens."""
    gradients = []
    for length in (TOKENS, TOKENS + 20):
        model = model_of(dsa_indexer_loss_coeff=0.5, dsa_indexer_use_sparse_loss=True)
        with replay_selections(model, rollout.laid_out(training_selections, length)):
            rollout.forward(length, model=model).sum().backward()
        named = model.named_parameters()
        gradients.append([p.grad * length for n, p in named if "indexer" in n])
    assert any(one.any() for one in gradients[0])
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-13)


def test_microbatches(rollout):
    """Two forwards; one whose sequences have no choice."""
    selections = training_selections(
        [rollout.requests[:2], rollout.requests[-1:]], [TOKENS, DSA.topk]
    )
    other = noisy(rollout.model)
    with replay_selections(other, selections):
        first = rollout.forward(TOKENS, slice(2), other)
        second = rollout.forward(DSA.topk, slice(-1, None), other)
    torch.testing.assert_close(first, rollout.forward(TOKENS, slice(2)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(second, rollout.forward(DSA.topk, slice(-1, None)))


def test_aborted_and_stopped(rollout):
    """What an aborted request has, and nothing of a training forward in between."""
    engine = engine_of(rollout.model)
    with record_request_selections(engine) as recorder:
        with engine:
            [number] = add(engine, REQUESTS[:1])
            for _ in range(4):
                engine.step()
            engine.stop()
            rollout.forward(TOKENS)
            assert len(recorder._pieces[number]) == 4
        with engine:
            [number] = add(engine, REQUESTS[:1])
            for _ in range(4):
                engine.step()
            engine.abort(number)
            [result] = step_to_the_end(engine)
        taken = recorder.take(number)
    assert result.finish == "abort"
    text = [*REQUESTS[0].prompt, *result.tokens]
    assert taken.num_tokens == len(text)
    for name, rows in taken.chosen.items():
        assert torch.equal(rows, rollout.requests[0].chosen[name][: len(rows)])


class TestRefused:
    @pytest.mark.parametrize(
        ("fields", "option", "value"),
        [
            ({}, "prefix_caching", True),
            ({}, "num_cuda_graphs", 4),
            ({"mtp_num_layers": 1}, "num_speculative_tokens", 1),
        ],
    )
    def test_engines(self, fields, option, value):
        engine = engine_of(generating_model(**generating_fields(**fields)), **{option: value})
        with refusal(f"{option}=", f"got {value}"), record_request_selections(engine):
            pass

    def test_models(self):
        model = generating_model(**generating_fields(mtp_num_layers=1))
        with refusal("mtp_num_layers"), record_request_selections(engine_of(model)):
            pass
        dense = engine_of(generating_model())
        with refusal("no layer with an indexer"), record_request_selections(dense):
            pass

    def test_numbers(self, rollout):
        engine = engine_of(rollout.model)
        with record_request_selections(engine) as recorder, engine:
            number = engine.add_request([1, 2, 3, 4], REQUESTS[0].sampling())
            engine.step()
            with refusal("request 0 has not ended"):
                recorder.take(number)
            with refusal("without requests"), record_request_selections(engine):
                pass
            step_to_the_end(engine)
            assert recorder.take(number).num_tokens == 4 + 8 - 1
            with refusal("request 0 has no selections"):
                recorder.take(number)

    def test_layouts(self, rollout):
        requests = rollout.requests
        with refusal("sequence 3 must have the 137 tokens", "got 136"):
            training_selections([requests], [136])
        with refusal("2 sequences for 1 requests"):
            training_selections(
                [requests[:1]], [packed((20, 20)).packed_seq_params(world.device())]
            )
        with refusal("1 microbatches and 2 layouts"):
            training_selections([requests], [TOKENS, TOKENS])
        with refusal("must have requests"):
            training_selections([], [])
        with refusal("of one model"):
            training_selections([[requests[0], RequestSelections(1, 9, {})]], [TOKENS])


def test_generations_begin_anew(rollout):
    engine = engine_of(rollout.model)
    with record_request_selections(engine) as recorder:
        for requests in (REQUESTS[1:2], REQUESTS[:1]):
            generate(engine, requests)
    assert recorder.take(0).num_tokens == 60 + 8 - 1
