"""No request emits what its grammar does not allow; others beside it do not notice."""

from types import SimpleNamespace

import pytest
import torch

from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.serving.sampling.sampler import RequestSampler
from absorbed_mla.serving.scheduler.full_cuda_graphs import FullCudaGraphs, clear_all
from tests.support.engine import CHUNKED, KEPT, engine_of, prompt
from tests.support.overlap_scheduler import count_in_flight, parity_model
from tests.support.structured import (
    KINDS,
    REASONING_ENDS,
    VOCABULARY,
    behind_reasoning,
    check_texts,
    sampled,
    structured,
)

pytest.importorskip("llguidance")

# A constrained request after each other one.
NAMES = list(KINDS)
PROMPTS = [prompt(20 + 3 * i, i) for i in range(2 * len(NAMES))]
FREE = [sampled(seed=i, max_tokens=40 + i) for i in range(len(NAMES))]
CONSTRAINED = [structured(**KINDS[name][0]).replace(seed=i) for i, name in enumerate(NAMES)]
# Every second one of these thinks before its text.
THINKING = NAMES[::2]
CONSTRAINED[::2] = [one.derived(reasoning_ends=REASONING_ENDS) for one in CONSTRAINED[::2]]
MIXED = [one for pair in zip(FREE, CONSTRAINED) for one in pair]


@pytest.fixture(scope="module")
def model():
    return parity_model(num_layers=1)


@pytest.fixture(scope="module")
def alone(model):
    """Results of the unconstrained requests without others."""
    with batch_invariant_mode():
        return engine_of(model, blocks=60).generate(PROMPTS[::2], FREE)


def engine_with(model, **options):
    engine = engine_of(model, **{"blocks": 60, **options})
    engine.set_vocabulary(VOCABULARY)
    return engine


def check_mixed(engine, alone):
    results = engine.generate(PROMPTS, MIXED)
    assert results[::2] == alone
    assert check_texts(results[1::2], NAMES, THINKING) >= len(NAMES) - 3
    begun = [behind_reasoning(one.tokens) for one in results[1::4]]
    # Most think something, and some have nothing else.
    assert sum(one is None for one in begun) < len(begun) // 2
    assert any(len(one.tokens) > len(text or ()) + 1 for one, text in zip(results[1::4], begun))
    engine.require_no_leak()
    return results


WAYS = {
    "prefix": KEPT,
    "evicted": {**CHUNKED, "blocks": 7},
    "evicted-megatron": {**CHUNKED, "blocks": 7, "decode_loop": False},
}


@pytest.fixture(scope="module")
def expected(model):
    """Of all requests; company, evictions and the scheduler change none of it."""
    with batch_invariant_mode():
        return engine_with(model).generate(PROMPTS, MIXED)


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_mixed(model, alone, expected, options):
    with batch_invariant_mode():
        engine = engine_with(model, **options)
        assert check_mixed(engine, alone) == expected
    assert bool(engine.statistics.evicted) == ("blocks" in options)


@pytest.mark.parametrize("graphs", [False, True])
def test_launched_ahead(model, alone, expected, graphs, monkeypatch):
    """The model of a step before the tokens of the one before it are known, as on a GPU."""
    launched = SimpleNamespace
    monkeypatch.setattr(
        FullCudaGraphs, "_captured", lambda self, step, larger: launched(replay=step)
    )
    with batch_invariant_mode():
        engine = engine_with(model, **({"num_cuda_graphs": 4} if graphs else {}))
        engine.scheduler.launches_ahead = True
        if graphs:
            engine.scheduler.runner.graphs = FullCudaGraphs(model)
        most, _ = count_in_flight(engine)
        assert check_mixed(engine, alone) == expected
        assert max(most) == 2
        if graphs:
            # Without the sampler, as long as one request is constrained.
            kinds = [kind for _, kind in engine.scheduler.runner.graphs._graphs]
            assert None in kinds and len(set(kinds)) > 1
    clear_all()


def test_drafts(drafting, monkeypatch):
    """Of right drafts, too, none behind the end of a text; wrong ones change nothing."""
    expected = engine_with(drafting).generate(PROMPTS, MIXED)
    engine = engine_with(drafting, num_speculative_tokens=2)
    assert engine.generate(PROMPTS, MIXED) == expected
    texts = [[*text, *result.tokens, *[0] * 9] for text, result in zip(PROMPTS, expected)]
    draw = RequestSampler._drawn

    def drawn(self, logits, rows, *, are_drafts=False):
        if not are_drafts:
            return draw(self, logits, rows)
        found = [texts[row.request.number][row.position] for row in rows]
        return torch.tensor(found, device=logits.device)

    monkeypatch.setattr(RequestSampler, "_drawn", drawn)
    assert engine.generate(PROMPTS, MIXED) == expected
    assert engine.statistics.accepted > sum(len(one.tokens) for one in expected) // 2
