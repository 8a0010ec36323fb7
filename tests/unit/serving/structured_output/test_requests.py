"""No request emits what its grammar does not allow, whatever runs the step, and no other notices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.serving.scheduler.full_cuda_graphs import FullCudaGraphs, clear_all
from tests.support.engine import CHUNKED, KEPT, engine_of, prompt, step_to_the_end
from tests.support.overlap_scheduler import count_in_flight, parity_model
from tests.support.structured import (
    END,
    KINDS,
    VOCABULARY,
    check_texts,
    sampled,
    structured,
    text_of,
)
from tests.unit.serving.conftest import made

pytest.importorskip("llguidance")

# A constrained request after each other one.
NAMES = list(KINDS)
PROMPTS = [prompt(20 + 3 * i, i) for i in range(2 * len(NAMES))]
FREE = [sampled(seed=i, max_tokens=40 + i) for i in range(len(NAMES))]
CONSTRAINED = [structured(**KINDS[name][0]).replace(seed=i) for i, name in enumerate(NAMES)]
MIXED = [one for pair in zip(FREE, CONSTRAINED) for one in pair]


@pytest.fixture(scope="module")
def model():
    return parity_model(num_layers=1)


@pytest.fixture(scope="module")
def alone(model):
    """Results of the unconstrained requests without others."""
    with batch_invariant_mode():
        return engine_of(model, blocks=60).generate(PROMPTS[::2], FREE)


def constrained_engine(model, **options):
    engine = engine_of(model, **{"blocks": 60, **options})
    engine.set_vocabulary(VOCABULARY)
    return engine


def check_mixed(engine, alone):
    results = engine.generate(PROMPTS, MIXED)
    assert results[::2] == alone
    assert check_texts(results[1::2], NAMES) >= len(NAMES) - 2
    engine.require_no_leak()
    return results


WAYS = {
    "scheduler": {},
    "megatron": {"decode_loop": False},
    "chunks": CHUNKED,
    "prefix": KEPT,
    "evicted": {**CHUNKED, "blocks": 7},
    "evicted-megatron": {**CHUNKED, "blocks": 7, "decode_loop": False},
    "paused": {"blocks": 11, "paused_cache_tokens": 256},
}


@pytest.fixture(scope="module")
def expected(model, alone):
    """Of all requests; company, evictions and the scheduler change none of it."""
    with batch_invariant_mode():
        return check_mixed(constrained_engine(model), alone)


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_mixed(model, alone, expected, options):
    with batch_invariant_mode():
        engine = constrained_engine(model, **options)
        assert check_mixed(engine, alone) == expected
    assert engine.statistics.evicted or "blocks" not in options or "paused" in str(options)


@pytest.mark.parametrize("graphs", [False, True])
def test_launched_ahead(model, alone, expected, graphs, monkeypatch):
    """The model of a step before the tokens of the one before it are known, as on a GPU."""
    launched = SimpleNamespace
    monkeypatch.setattr(
        FullCudaGraphs, "_captured", lambda self, step, larger: launched(replay=step)
    )
    with batch_invariant_mode():
        engine = constrained_engine(model, **({"num_cuda_graphs": 4} if graphs else {}))
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
