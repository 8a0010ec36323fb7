"""Decode steps whose requests share a prefix attend to it together, and results stay the same."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from absorbed_mla.inference.backends import reference
from absorbed_mla.serving.scheduler.cascade_attention import (
    CascadeAttention,
    find_groups,
    keys_saved,
    why_not,
)
from tests.support import needs
from tests.support.engine import KEPT, Request, Run, add, assert_generates, engine_of, prompt
from tests.support.engine import step_to_the_end as to_the_end
from tests.unit.serving.scheduler.test_prefill_graphs import Recorded, all_keys

# Of two prefixes of two blocks and one, and of none; of other lengths, so that rows move.
LONG, SHORT = prompt(130, 50), prompt(70, 51)
PROMPTS = [LONG + prompt(9), SHORT + prompt(3), LONG + prompt(5, 1), prompt(20, 2)]
FIRST = [Request(text, tokens) for text, tokens in zip(PROMPTS, (4, 12, 12, 9))]
LATER = [Request(SHORT + prompt(4, 3), 6), Request(LONG + prompt(8, 4), 9)]
# The second loses its blocks, and has some of them again; see ``test_shared.py``.
PAIR = [Request(prompt(120, seed, shared=70), 90) for seed in range(2)]
SHORTER = [Request(one.prompt, 9) for one in PAIR]
CASES = {
    "overlap": (FIRST, LATER, {}),
    "megatron": (FIRST, LATER, {"decode_loop": False}),
    "drafts": (FIRST, LATER, {"num_speculative_tokens": 2}),
    "graphs": (FIRST, LATER, {"num_cuda_graphs": 2}),
    "evicted": (PAIR, [], {"blocks": 6}),
    "one group, in graphs": (SHORTER, [], {"num_cuda_graphs": 2}),
}


def run(model, cascade: str, first, later, options) -> tuple[Run, int, int, set]:
    """Results, steps that had groups, the most groups of one, and what keys of graphs say."""
    with engine_of(model, **KEPT, cascade_attention=cascade, **options) as engine:
        controller, most = engine.host.controller, 0
        if "num_cuda_graphs" in options and engine.scheduler is not None:
            # As Megatron has them where it captures graphs.
            width = engine.host.context.max_requests, controller.vocab_size
            controller._all_logits_cuda = torch.zeros(1, *width)
            controller._enable_cuda_graph = engine.scheduler.launches_ahead = True
            engine.scheduler.runner.graphs = Recorded(model)
        add(engine, first, log_probs=True)
        for step in range(300):
            if step == 3:
                add(engine, later, log_probs=True)
            if engine.is_busy():
                engine.step()
            if engine.cascade is not None:
                most = max(most, len(engine.cascade._groups))
        found = Run(to_the_end(engine), engine.statistics)
        engine.require_no_leak()
        graphs = engine.scheduler.runner.graphs if engine.scheduler else None
        keys = {key[2:] for key in graphs._graphs} if graphs else set()
        return found, engine.cascade.steps if engine.cascade else 0, most, keys


@pytest.mark.parametrize(
    "name",
    # Graphs are recorded ones, of a CPU.
    [pytest.param(name, marks=needs.no_gpu if "graphs" in name else ()) for name in CASES],
)
def test_same_results(model, drafting, monkeypatch, name):
    """Tokens, and log-probabilities within rounding, of requests that come, go and are evicted."""
    monkeypatch.setattr(reference._Keys, "__init__", all_keys)
    of, (first, later, options) = drafting if name == "drafts" else model, CASES[name]
    expected, *none, _ = run(of, "off", first, later, options)
    found, steps, most, keys = run(of, "on", first, later, options)
    assert_generates(found, expected.results)
    assert none == [0, 0] and most == (2 if later else 1) and steps > 3
    assert (("cascade", not later) in keys) == ("graphs" in name), "rows in order need no copies"
    assert found.statistics.evicted == (name == "evicted")


def test_nothing_is_shared(model):
    _, steps, *_ = run(model, "on", [Request(prompt(130, n), 3) for n in range(2)], [], {})
    assert steps == 0 == run(model, "on", PAIR[:1], [], {})[1]


def test_graphs_of_layers_hold_no_groups(model):
    """Those that Megatron captures, each before any request is there."""
    assert run(model, "on", FIRST, [], {"decode_loop": False, "num_cuda_graphs": 2})[1] == 0


TABLE = np.array(
    [
        [7, 1, 2, 3, 10],
        [8, 4, 5, 6, 11],
        [7, 1, 2, 12, -1],
        [7, 1, 2, 3, 13],
        [9, 14, 15, 16, 17],
        [8, 4, 18, 19, 20],
    ]
)


@pytest.mark.parametrize(
    ("cached", "groups"),
    [
        ([4] * 6, [([0, 2, 3], 3), ([1, 5], 2)]),
        # Two save more over four blocks than three over one.
        ([4, 4, 1, 4, 4, 4], [([0, 3], 4), ([1, 5], 2)]),
        ([4, 1, 4, 0, 4, 4], [([0, 2], 3), ([1, 5], 1)]),
        ([0] * 6, []),
    ],
)
def test_groups(cached, groups):
    """Those that save most, over what all rows have cached as a whole."""
    found = find_groups(TABLE, np.array(cached), lambda members, blocks: (members - 1) * blocks)
    assert [(rows.tolist(), blocks) for rows, blocks in found] == groups


def test_groups_that_hold_are_kept():
    """Of the same requests, unless one was computed again, or the engine started anew."""
    context = SimpleNamespace(
        paused_request_count=0,
        total_request_count=6,
        request_query_lengths=torch.ones(6),
        block_size_tokens=64,
        request_ids=torch.arange(6),
        request_to_kv_block_ids=torch.from_numpy(TABLE.copy()),
        request_kv_length_offsets=torch.full((6,), 4 * 64),
    )
    cascade = CascadeAttention(context, None)
    changes = {
        "request_ids": (0, 0, [([0, 2, 3], 3), ([1, 5], 2)]),
        "request_to_kv_block_ids": (1, 99, [([0, 2, 3], 3)]),
        "request_kv_length_offsets": (2, 64, [([0, 3], 4)]),
    }
    for name, (row, value, groups) in changes.items():
        getattr(context, name)[row] = value
        found = cascade._groups_of_step()
        assert [(rows.tolist(), blocks) for rows, blocks in found] == groups
        assert cascade._groups_of_step() is found
    cascade.forget()
    assert cascade._groups_of_step() is not found


@pytest.mark.parametrize(
    ("members", "queries", "heads", "saved"),
    [
        (64, 1, 16, 48),
        (64, 1, 32, 32),
        (64, 1, 33, 0),
        (64, 1, 128, 0),
        (3, 3, 16, 0),
        (1, 1, 1, 0),
    ],
)
def test_keys_that_are_saved(members, queries, heads, saved):
    assert keys_saved(members, queries, 8192, heads) == saved * 8192


@pytest.mark.parametrize(
    ("heads", "rows", "blocks", "own", "taken"),
    [
        (16, 64, 128, 512, True),
        (128, 64, 128, 512, False),
        (16, 64, 16, 512, False),
        (16, 2, 128, 512, False),
        (16, 64, 48, 40_000, False),  # a small part of what is read
        (None, 2, 1, 40_000, True),
    ],
)
def test_where_it_saves_time(heads, rows, blocks, own, taken):
    table, lengths = np.ones((rows, blocks)), np.full(rows, blocks * 64 + own)
    cascade = CascadeAttention(SimpleNamespace(block_size_tokens=64), heads)
    assert bool(cascade._find(table, np.full(rows, blocks), lengths, 1)) is taken


LAYER = {"batch_invariant": False, "form": "auto", "paged_attention_backend": "auto"}


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("parity mode", {"batch_invariant": True}),
        ("form='expanded'", {"form": "expanded"}),
        ("attention has windows", {"window": 5}),
        ("FlashMLA", {"paged_attention_backend": "flash_mla"}),
    ],
)
def test_refused(model, monkeypatch, why, changes):
    options = SimpleNamespace(**LAYER | changes)
    layer = SimpleNamespace(options=options, window=changes.get("window"))
    layers = [SimpleNamespace(options=options, cached_attention=layer)]
    for module in ("cascade_attention", "prefill_graphs"):
        name = f"absorbed_mla.serving.scheduler.{module}.attentions"
        monkeypatch.setattr(name, lambda _: layers)
    with pytest.raises(ValueError, match=f"cascade_attention='on' cannot run: {why}"):
        engine_of(model, prefix_caching=True, cascade_attention="on")
    assert engine_of(model, prefix_caching=True, cascade_attention="auto").cascade is None


def test_needs_a_prefix_cache(model):
    with pytest.raises(ValueError, match="cascade_attention needs prefix_caching=True, got False"):
        engine_of(model, cascade_attention="on")
    assert engine_of(model, cascade_attention="auto").cascade is None
    assert engine_of(model, prefix_caching=True).cascade is None
    # Where one of several ranks captures, the others' replays lack its collectives.
    engine = engine_of(model, prefix_caching=True, cascade_attention="auto")
    assert "data-parallel ranks" in why_not(model, engine.options, lockstep=engine.cascade)
