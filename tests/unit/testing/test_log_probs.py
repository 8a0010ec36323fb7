"""tests/support/log_probs.py, which judges whole models on GPUs: what passes, and what does not."""

import functools
import json
from dataclasses import replace

import pytest
import torch

from absorbed_mla import LLM
from tests.conversion.models import Architecture
from tests.support import needs
from tests.support.log_probs import (
    ROUTED_FACTOR,
    Errors,
    assert_as_exact_as_bf16,
    by_transformers,
    errors_of,
    errors_of_transformers,
    exceeded,
    written,
)
from tests.support.wide_models import NARROW, wide_folder

pytestmark = needs.no_gpu

CPU = torch.device("cpu")
PROMPTS = [list(range(n, 2 * n)) for n in (3, 40, 65)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("log_probs") / "experts"
    return wide_folder(path, Architecture("v3", True, True, "rope"), **NARROW)


@pytest.fixture
def texts(folder, forked_python):
    return _written(folder)


@functools.cache
def _written(folder):
    with LLM(folder, prompt_logprobs=True) as llm:
        return written(llm, PROMPTS, 9)


def test_a_model_in_bf16(folder, texts):
    assert [len(text.log_probs) for text in texts] == [len(p) - 1 + 9 for p in PROMPTS]
    assert [text.tokens[: len(p)] for text, p in zip(texts, PROMPTS)] == PROMPTS
    assert_as_exact_as_bf16(folder, texts, CPU, ROUTED_FACTOR)
    # Without those of the prompts.
    few = [replace(text, log_probs=text.log_probs[-9:]) for text in texts]
    assert_as_exact_as_bf16(folder, few, CPU, ROUTED_FACTOR)
    shifted = [replace(text, log_probs=text.log_probs[-10:-1]) for text in texts]
    with pytest.raises(AssertionError, match="median"):
        assert_as_exact_as_bf16(folder, shifted, CPU, ROUTED_FACTOR)


def test_other_experts(folder, texts):
    """The model of the text had no groups of experts."""
    config = folder / "config.json"
    as_it_was = config.read_text()
    config.write_text(json.dumps({**json.loads(as_it_was), "n_group": 1}))
    try:
        with pytest.raises(AssertionError, match="median"):
            assert_as_exact_as_bf16(folder, texts, CPU, ROUTED_FACTOR)
    finally:
        config.write_text(as_it_was)


def test_figures(folder, texts):
    tables = by_transformers(folder, [text.tokens for text in texts], torch.float32, CPU)
    exact = errors_of_transformers(texts, tables, tables)
    assert (exact.worst, exact.rms) == (0.0, 0.0)
    assert exact.positions == sum(len(text.log_probs) for text in texts)
    found = errors_of(texts, tables)
    assert 0 < found.rms < found.worst and found.same_choice > 0.5
    lies = [replace(text, log_probs=[*text.log_probs[:-1], float("nan")]) for text in texts]
    with pytest.raises(AssertionError, match="no number"):
        errors_of(lies, tables)


def test_another_token_was_taken():
    """Though its log-probability is right."""
    bf16 = Errors(worst=0.1, rms=0.01, median=0.001, positions=9, same_choice=1.0, worst_choice=0.0)
    assert not exceeded(replace(bf16, worst_choice=0.39), bf16)
    assert "0.41 less likely than the best" in exceeded(replace(bf16, worst_choice=0.41), bf16)
    assert "worst 0.21" in exceeded(replace(bf16, worst=0.21), bf16)
    assert not exceeded(replace(bf16, worst=0.21), bf16, ROUTED_FACTOR)
    assert "median 0.0021" in exceeded(replace(bf16, median=0.0021), bf16, ROUTED_FACTOR)
    assert "rms 0.041" in exceeded(replace(bf16, rms=0.041), bf16, ROUTED_FACTOR)
