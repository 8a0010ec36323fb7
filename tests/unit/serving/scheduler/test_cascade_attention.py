"""Requests that share a prefix attend to it together, with the tokens of those that do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from absorbed_mla.serving.scheduler import cascade_attention
from absorbed_mla.serving.scheduler.cascade_attention import find_groups, keys_saved
from absorbed_mla.inference.backends import reference
from tests.support.engine import (
    KEPT,
    Request,
    add,
    assert_generates,
    by_whole_forwards,
    engine_of,
    generate,
    prompt,
    Run,
)
from tests.unit.serving.scheduler.test_prefill_graphs import Recorded, all_keys

ON = {**KEPT, "cascade_attention": "on"}
REQUESTS = [Request(prompt(140, seed, shared=130), 12) for seed in range(4)]

WAYS = {
    "overlap": {},
    "megatron": {"decode_loop": False},
    "drafts": {"num_speculative_tokens": 2},
}


@pytest.fixture(scope="module")
def expected(model, drafting):
    """Of either model, by its number of layers that draft."""
    return {one: by_whole_forwards(one, REQUESTS) for one in (model, drafting)}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_generates(model, drafting, expected, options):
    of = drafting if "num_speculative_tokens" in options else model
    engine = engine_of(of, **ON | options)
    run = generate(engine, REQUESTS, log_probs=True)
    print(engine.cascade.steps, run.statistics)
    assert_generates(run, expected[of])


@pytest.mark.parametrize("ahead", [False, True])
def test_graphs(model, expected, monkeypatch, ahead):
    monkeypatch.setattr(reference._Keys, "__init__", all_keys)
    engine = engine_of(model, **ON, num_cuda_graphs=2)
    c = engine.host.controller
    c._all_logits_cuda = torch.zeros(1, engine.host.context.max_requests, c.vocab_size)
    c._enable_cuda_graph = True
    engine.scheduler.launches_ahead = ahead
    engine.scheduler.runner.graphs = Recorded(model)
    run = generate(engine, REQUESTS, log_probs=True)
    print(engine.cascade.steps, run.statistics, engine.scheduler.runner.graphs._graphs)
    assert_generates(run, expected[model])
