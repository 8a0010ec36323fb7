"""Selections of an engine's requests in the training forward of their texts.

In fp64: prompts read in chunks, requests side by side, and some that lose their blocks.
"""

from dataclasses import replace

import pytest
import torch

from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.dsa.replay import record_selections, replay_selections
from absorbed_mla.dsa.request_selections import RequestSelections, training_selections
from absorbed_mla.options import AbsorbedMLAOptions
from tests.support import world
from tests.support.cases import INTERPRETED
from tests.support.dsa_models import DSA, generating_fields
from tests.support.engine import (
    CHUNKED,
    KEPT,
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
REQUESTS = [Request(prompt(n, n, shared=min(n, 64)), 8) for n in (60, 70, 61, 130, 63, 5)] + [
    Request(prompt(2, 9), 1)
]
CROWDED = {**CHUNKED, "blocks": 5}
TOKENS = 140


def roll_out(model, requests=REQUESTS, **options) -> Rollout:
    run = generate(engine_of(model, enable_return_indexer_topk=True, **options), requests)
    statistics = run.statistics
    assert "blocks" not in options or statistics.evicted or statistics.most_paused
    assert "prefix_caching" not in options or any(one.num_cached_tokens for one in run.results)
    texts = [[*request.prompt, *tokens] for request, tokens in zip(requests, run.tokens)]
    taken = [RequestSelections.of(model, result.indexer_topk) for result in run.results]
    return Rollout(model, texts, taken)


def model_of(dtype=torch.float64, options=None, dsa=DSA, **changes):
    fields = generating_fields(dsa, init_method_std=0.4, **changes)
    return generating_model(options, dtype=dtype, **fields)


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    return roll_out(model_of(), **CROWDED)


LAYOUTS = ("sbhd", "thd", "thd_padded")


def noisy(model, *built):
    """The model with other indexers."""
    other = model_of(*built)
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
            assert (rows.dtype, rows.shape) == (torch.int32, (len(text) - 1, DSA.topk))
            last = torch.arange(len(text) - 1)
            assert (rows.amax(-1) <= last).all()
            assert ((rows >= 0).sum(-1) == (last + 1).clamp(max=DSA.topk)).all()


ENGINES = {
    "paused": {**CROWDED, "paused_blocks": 1},
    "prefix cache": {**KEPT, "max_requests": 2},
    "sizes of graphs": {"num_cuda_graphs": 4},
    "drafts": {"num_speculative_tokens": 1},
}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_engines(rollout, options):
    model = rollout.model
    if "num_speculative_tokens" in options:
        model = model_of(mtp_num_layers=1)
        model.load_state_dict(rollout.model.state_dict(), strict=False)
    found = roll_out(model, **options)
    assert found.texts == rollout.texts
    for one, expected in zip(found.requests, rollout.requests):
        torch.testing.assert_close(one.chosen, expected.chosen, rtol=0, atol=0)


def test_prefilled_again():
    """The later selections count: here they are another indexer's."""
    engine = engine_of(model_of(), enable_return_indexer_topk=True, **CROWDED)
    with engine:
        add(engine, REQUESTS)
        while not engine.statistics.evicted:
            engine.step()
        [number, *_] = engine.host.waiting_request_ids
        engine.model.load_state_dict(noisy(engine.model).state_dict())
        result = step_to_the_end(engine)[number]
        text = [*REQUESTS[number].prompt, *result.tokens]
    request = RequestSelections.of(engine.model, result.indexer_topk)
    found = Rollout(engine.model, [text], [request])
    with record_selections(engine.model) as own:
        found.forward(TOKENS)
    for name, rows in request.chosen.items():
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


def test_importance_ratio():
    """In parity mode 1 to the bit with replay, and not without."""
    options = AbsorbedMLAOptions(batch_invariant=True)
    # What the kernels of parity mode on a GPU compute in, and the widths that they accept.
    dtype = torch.bfloat16 if world.device().type == "cuda" else torch.float32
    built = dtype, options, replace(DSA, mla=INTERPRETED, width=16)
    with batch_invariant_mode(world.device().type):
        rollout = roll_out(model_of(*built), **CROWDED)
        expected = rollout.forward(TOKENS)
        other = noisy(rollout.model, *built)
        own = rollout.forward(TOKENS, model=other)
        with replay_selections(other, rollout.laid_out(training_selections, TOKENS)):
            found = rollout.forward(TOKENS, model=other)
    assert torch.equal((found - expected).exp(), torch.ones_like(found))
    assert ((own - expected).exp() - 1).abs().max() > 0.1


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


class TestRefused:
    def test_models(self):
        with refusal("enable_return_indexer_topk", "'dsa'"):
            engine_of(generating_model(), enable_return_indexer_topk=True)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda found: found[:, :1], ["2 layers with an indexer, 3", "(1, 3)"]),
            (lambda found: found[..., :2], ["3]", "(2, 2)"]),
            (lambda found: torch.full_like(found, -1), ["[-1, -1, -1] ... for token 0"]),
            (lambda found: found + 1, ["none of them after it", "for token 0 in layer 0"]),
        ],
    )
    def test_arrays(self, rollout, change, words):
        request = rollout.requests[0]
        found = torch.stack([*request.chosen.values()], 1)
        again = RequestSelections.of(rollout.model, found.numpy())
        torch.testing.assert_close(again.chosen, request.chosen, rtol=0, atol=0)
        words = [word.replace("(1, 3)", f"({len(found)}, 1, 3)") for word in words]
        words = [word.replace("(2, 2)", f"({len(found)}, 2, 2)") for word in words]
        with refusal(*words):
            RequestSelections.of(rollout.model, change(found))

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
