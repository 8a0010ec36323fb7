"""Requests that share a prefix attend to it together: the same tokens, and fewer keys read."""

from __future__ import annotations

import numpy as np
import pytest

from absorbed_mla.serving.scheduler.cascade_attention import find_groups, keys_saved
from tests.support.engine import (
    KEPT,
    Request,
    add,
    assert_generates,
    by_whole_forwards,
    engine_of,
    generate,
    prompt,
)

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
