"""Sliding windows: how spans are cut, masks and dropout, mixed layers in an engine, refusals."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.core_attention.window import WindowedBackend, near_and_far, window_of
from tests.distributed.engines import CROWDED, PROMPTS, assert_crowded
from tests.support import world
from tests.support.cases import TINY, config_for
from tests.support.dsa import TINY_DSA, dsa_fields
from tests.support.engine import Request, check_generates, generating_model
from tests.support.harness import Setup, build_attention, random_attention
from tests.support.layouts import dense
from tests.support.refusal import refusal

WINDOW = replace(TINY, window=3)
FP8 = {"latent_cache_dtype": "fp8", "train_on_cached_latents": True}


def pairs(spans: Spans, queries: int, keys: int) -> torch.Tensor:
    """How many spans show each key to each query, [queries, keys]."""
    found = torch.zeros(queries, keys, dtype=torch.int)
    for span in spans:
        shown = torch.ones(span.num_queries, span.num_keys, dtype=torch.int)
        found[span.queries, span.keys] += shown.tril(span.causal_offset)
    return found


@settings(deadline=None, max_examples=300)
@given(
    st.tuples(st.integers(0, 3), st.integers(1, 14), st.integers(0, 3)),
    st.tuples(st.integers(0, 3), st.integers(1, 14), st.integers(0, 3)),
    st.integers(-9, 20),
    st.integers(1, 9),
)
def test_spans_show_every_key_of_a_window_once(on_queries, on_keys, offset, window):
    """With tokens around the span, fewer keys than queries, keys that are all too old."""
    (first, count, _), (key, keys, _) = on_queries, on_keys
    shape = sum(on_queries), sum(on_keys)
    span = Span(first, first + count, key, key + keys, offset)
    near, far = near_and_far(Spans([span]), window, *shape)
    expected = torch.zeros(shape, dtype=torch.int)
    band = torch.ones(count, keys, dtype=torch.int).tril(offset).triu(offset - window + 1)
    expected[first : first + count, key : key + keys] = band
    assert torch.equal(pairs(near, *shape) + pairs(far, *shape).flip((0, 1)), expected)
    for spans in (near, far):
        queries = [query for each in spans for query in range(*each.queries.indices(99))]
        assert queries == sorted(set(queries)) and all(each.causal_offset >= 0 for each in spans)


@pytest.mark.parametrize(("window", "given"), [(13, 13), (14, None)])
def test_backends_that_bound_keys_get_the_window(window, given):
    """In one call, unless it holds all that the spans show."""
    backend = SimpleNamespace(windows=True, forward=lambda *of: of[-1], backward=lambda *of: of[-1])
    rules = ScoreRules(1.0, Spans([Span(0, 9, 0, 9, 0), Span(9, 13, 0, 14, 10)]))
    found = WindowedBackend(backend, window)
    for each in (found.forward(None, rules), found.backward(None, None, None, rules)):
        assert each.window == given and each.spans is rules.spans


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_mask_and_dropout(form):
    """The bits do not matter, the pairs that are hidden and dropped do."""
    layout, found = dense(11, 2), []
    x = layout.random_rows(TINY.hidden, 1).to(world.device())
    old = torch.ones(11, 11, dtype=torch.bool, device=x.device).tril(-3)
    hidden = torch.zeros(2, 1, 11, 11, dtype=torch.bool, device=x.device)
    hidden[0, :, :, 2] = hidden[1, :, 5:, 4] = True
    for mla, mask in ((WINDOW, hidden), (TINY, hidden | old)):
        attention = random_attention(mla, Setup(form=form), attention_dropout=0.4)
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        leaf = x.clone().requires_grad_()
        out, _ = attention(leaf, mask)
        found.append((out, *torch.autograd.grad(out.sum(), leaf)))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "options",
    [{"form": "absorbed"}, {"form": "expanded"}, FP8],
    ids=["absorbed", "expanded", "fp8"],
)
def test_engine(options):
    """One layer of two has a window: chunks, shared prefixes, eviction, sizes of graphs."""
    options = AbsorbedMLAOptions(**options, context_chunk_size=48)
    fields = {"window_size": (20, 0), "window_attn_skip_freq": [1, 0]}
    graphs = {} if options.form == "expanded" else {"num_cuda_graphs": 4}
    requests = [Request(text, 12) for text in PROMPTS]
    # With FP8 a latent may be rounded to the next number: 1e-5 here, 5.4e-5 on an H200.
    atol = 2e-4 if options.latent_cache_dtype == "fp8" else 5e-5
    model = generating_model(options, **fields)
    run = check_generates(model, requests, atol, **CROWDED, **graphs)
    assert_crowded(run.statistics)


@pytest.mark.parametrize(
    "skipped, numbers", [(None, {1, 2, 3, 4}), (2, {1, 3}), ([0, 1, 1, 0], {2, 3})], ids=str
)
def test_layers(skipped, numbers):
    """As Megatron counts them."""
    config = config_for(TINY, window_size=(511, 0), window_attn_skip_freq=skipped)
    found = {n: window_of(config, n, causal=True) for n in range(1, 5)}
    assert found == {n: 512 if n in numbers else None for n in range(1, 5)}


@pytest.mark.parametrize("size", [(-1, 0), (3, 1), (-1, -1)], ids=str)
def test_refused_sizes(size):
    with refusal("window_size must be None", f"got {size}"):
        build_attention(TINY, Setup(), window_size=size)


@pytest.mark.parametrize(
    "parts, setup, fields",
    [
        (("attn_mask_type",), {"mask_type": AttnMaskType.no_mask}, {}),
        (("batch_invariant=True", "window_size"), {"batch_invariant": True}, {}),
        (("experimental_attention_variant='dsa'", "window_size"), {}, dsa_fields(TINY_DSA)),
    ],
    ids=["no_mask", "parity", "dsa"],
)
def test_refused(parts, setup, fields):
    with refusal(*parts):
        build_attention(WINDOW, Setup(**{"form": "auto", **setup}), **fields)
