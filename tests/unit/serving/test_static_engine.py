"""Batches of prompts over a ``StaticInferenceContext``, also by Megatron's engine, unmodified."""

import pytest
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.engines import StaticInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.core.inference.utils import InferenceMode

from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.serving.tokenizers.token_ids import IntegerTokenizer
from tests.support.engine import Request, by_whole_forwards, generating_model, prompt
from tests.support.generation import by_static_context
from tests.support.models import VOCAB

NUM_TOKENS = 5


@pytest.fixture(scope="module")
def model():
    return generating_model(num_layers=1).eval()


@pytest.fixture
def engine(model, request):
    """Of batches of two; Megatron's mark that an engine is active is gone afterwards."""
    wrapper = GPTInferenceWrapper(model, StaticInferenceContext(2, 64))
    controller = TextGenerationController(wrapper, IntegerTokenizer(VOCAB))
    yield StaticInferenceEngine(controller, legacy=request.param, buffer_size_gb=0.001)
    InferenceMode.unset_active()


def generate(engine, requests) -> list[list[int]]:
    texts = [" ".join(map(str, request.prompt)) for request in requests]
    sampling = SamplingParams(num_tokens_to_generate=NUM_TOKENS, top_k=1)
    found = engine.generate(texts, sampling_params=sampling)
    return [result.generated_tokens.tolist() for result in found]


@pytest.mark.parametrize("engine", [True, False], ids=["legacy", "default"], indirect=True)
def test_tokens_of_whole_forwards(model, engine):
    """Unequal prompts, more than a batch has; twice, over what the first time left in the cache.

    Megatron puts a dynamic engine under it by default, whose blocks of 256 tokens are not for
    latents; it says so itself and goes on without.
    """
    assert engine.legacy
    for seed in range(2):
        lengths = (3, 20, 9, 9, 30)
        requests = [Request(prompt(n, seed * 10 + i), NUM_TOKENS) for i, n in enumerate(lengths)]
        expected = by_whole_forwards(model, requests)
        assert generate(engine, requests) == [result.tokens for result in expected]


@pytest.mark.parametrize(
    ("form", "prefill_size"), [("auto", 256), ("absorbed", 24), ("expanded", 1), ("expanded", 24)]
)
def test_uneven_prompts(form, prefill_size):
    """Read in parts, so that the expanded form gathers what the parts before cached."""
    options = AbsorbedMLAOptions(form=form, context_chunk_size=7)
    model, prompts = generating_model(options, num_layers=1).eval(), [prompt(30, 1), prompt(64, 2)]
    found = by_static_context(model, prompts, NUM_TOKENS, prefill_size=prefill_size)
    expected = by_whole_forwards(model, [Request(one, NUM_TOKENS) for one in prompts])
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    for one, other in zip(found, expected):
        assert one.log_probs == pytest.approx(other.log_probs, abs=5e-5)
