"""generate.py's options of LLM and of sampling, as they are declared, under Megatron's names."""

from __future__ import annotations

import pytest

from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.option_schema import options_of
from absorbed_mla.serving.options import ModelFields
from generation.arguments import parse_arguments


def parsed(*words: str):
    return parse_arguments(["--load", "x", "--preset", "tiny", *words], 1)


def test_options_of_a_live_model():
    """All but those that the command has decided."""
    known = options_of(LLMOptions)
    live = set(known) - set(options_of(ModelFields))
    decided = {"gpu_memory_utilization", "prompt_logprobs", "num_speculative_tokens"}
    given = parsed().llm
    assert set(given) == live - decided
    assert given == {**{name: known[name].default for name in given}, "seed": 1234}


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        ("--max-sequence-length 60", "max_model_len", 60),
        ("--max-requests 3", "max_num_seqs", 3),
        ("--step-tokens 70", "max_num_batched_tokens", 70),
        ("--no-prefix-caching", "enable_prefix_caching", False),
        ("--no-chunked-prefill", "enable_chunked_prefill", False),
        ("--decode-context-parallel-auto", "decode_context_parallel", "auto"),
        ("--host-cache-tokens 640", "host_cache_tokens", 640),
    ],
)
def test_flags(words, option, value):
    assert parsed(*words.split()).llm[option] == value


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            "--host-cache-tokens 5",
            "--host-cache-tokens must be an integer of at least 64, or 0, got",
        ),
        ("--cache-tokens 5", "--cache-tokens must be an integer of at least 64, got 5"),
        (
            "--host-cache-tokens 640 --cuda-graphs",
            "--host-cache-tokens needs --cuda-graphs=False, got True",
        ),
        (
            "--prefix-cache-dir x --no-prefix-caching",
            "--prefix-cache-dir needs enable_prefix_caching=True, got False",
        ),
        ("--num-speculative-tokens 1", "unrecognized arguments: --num-speculative-tokens"),
    ],
)
def test_refused(words, error):
    with pytest.raises(ValueError) as refused:
        parsed(*words.split())
    assert str(refused.value).startswith(error)


def test_sampling():
    """The seed is the engine's: with one of the request, equal prompts would draw equal tokens."""
    given = parsed("--seed", "5", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.25")
    assert given.llm["seed"] == 5 and given.sampling.seed is None
    sampling = given.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 3, 0.25)
    assert (sampling.max_tokens, sampling.logprobs, sampling.ignore_eos) == (128, None, False)
    assert parsed().sampling.top_p == 1.0
    assert parsed("--greedy").sampling.is_greedy
