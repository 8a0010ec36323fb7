"""Greedy tokens over a cache are those of whole forwards: forms, chunks, contexts, layers.

In fp32 on the CPU, so that a token differs only where something is wrong. If these fail, the model
that generates is not the model that was trained.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.serving.request_results import Result
from tests.support.cases import TINY
from tests.support.engine import generating_model
from tests.support.generation import (
    by_dynamic_context,
    by_forwards,
    by_static_context,
    prompts_of,
)
from tests.support.models import MIXED

# Shorter and longer than a block of 64 tokens, one token, whole blocks.
PROMPTS = prompts_of((5, 70, 130, 1, 64))
NUM_TOKENS = 10
# Log-probs about 1; rounding moved them by 4e-6 at most.
BOUND = 3e-5


def wide_model(options: AbsorbedMLAOptions | None = None, **changes):
    """Its weights are so wide that it does not repeat itself."""
    return generating_model(options, init_method_std=0.4, **changes).eval()


def assert_same(actual: list[Result | None], expected: list[Result]) -> None:
    assert [text.tokens for text in actual] == [text.tokens for text in expected]
    for ours, theirs in zip(actual, expected):
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=BOUND)


@pytest.fixture(scope="module")
def expected() -> list[Result]:
    texts = by_forwards(wide_model(), PROMPTS, NUM_TOKENS)
    # A model that repeats itself would not notice what is lost.
    assert all(len(set(text.tokens)) > NUM_TOKENS // 2 for text in texts)
    return texts


@pytest.mark.parametrize("context_chunk_size", [7, 2**16])
@pytest.mark.parametrize("form", ["auto", "absorbed", "expanded"])
class TestForms:
    def test_static(self, form, context_chunk_size, expected):
        """Prefilled in parts, so that the expanded form gathers what the parts before cached."""
        options = AbsorbedMLAOptions(form=form, context_chunk_size=context_chunk_size)
        model = wide_model(options)
        texts = by_static_context(model, PROMPTS[1::3], NUM_TOKENS, prefill_size=24)
        assert_same(texts, expected[1::3])

    def test_dynamic(self, form, context_chunk_size, expected):
        """At most 64 tokens in a step: long prompts in chunks, with others' decode beside them."""
        options = AbsorbedMLAOptions(form=form, context_chunk_size=context_chunk_size)
        model = wide_model(options)
        assert_same(by_dynamic_context(model, PROMPTS, NUM_TOKENS, step_tokens=64), expected)


@pytest.mark.parametrize("prefill_size", [1, 256])
def test_static_batch_of_uneven_prompts(prefill_size, expected):
    model = wide_model()
    texts = by_static_context(model, PROMPTS[:2], NUM_TOKENS, prefill_size=prefill_size)
    assert_same(texts, expected[:2])


@pytest.mark.parametrize(
    "options",
    [
        {"prefix_caching": True},
        {"blocks": 6},
        {"num_cuda_graphs": 4},
    ],
    ids=["prefix-cache", "full", "padded-as-for-graphs"],
)
def test_whatever_the_engine_does(options, expected):
    model = wide_model()
    prompts = [*PROMPTS, PROMPTS[2]]
    texts = by_dynamic_context(model, prompts, NUM_TOKENS, **options)
    assert_same(texts, [*expected, expected[2]])


@pytest.mark.parametrize("generated", [by_static_context, by_dynamic_context])
@pytest.mark.parametrize(
    "changes",
    [
        {"mla": replace(TINY, q_lora_rank=None)},
        {"mla": replace(TINY, rope=0, rope_type="rope", kv_lora_rank=20)},
        {"mla": replace(TINY, latent_norm=False)},
        MIXED,
        {"options": AbsorbedMLAOptions(down_projection="column_parallel")},
    ],
    ids=["no-q-lora", "no-rope", "no-latent-norm", "experts", "column-parallel"],
)
def test_layers(changes, generated):
    model = wide_model(**changes)
    prompts = prompts_of((40, 43))
    assert_same(generated(model, prompts, 6), by_forwards(model, prompts, 6))


def test_the_whole_prompt_counts():
    """So these tests see a lost context: the first token of a long prompt changes the text."""
    model, prompt = wide_model(), PROMPTS[1]
    other = [[(prompt[0] + 1) % 64, *prompt[1:]]]
    [before], [after] = (by_dynamic_context(model, each, 1) for each in ([prompt], other))
    assert abs(before.log_probs[0] - after.log_probs[0]) > 100 * BOUND
