"""generate.py's command line: options of LLM and sampling under Megatron's names, and errors."""

import re
import shlex
from pathlib import Path

import pytest

from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.option_schema import options_of
from absorbed_mla.serving.options import ModelFields
from checkpoint_conversion import command_line
from generation.arguments import parse_arguments, with_model
from generation.model import check_graphs, check_model

ONE = "must be an integer of at least 1"


def parsed(line: str = "", processes: int = 1):
    return parse_arguments(["--load", "a folder", "--preset", "tiny", *line.split()], processes)


def test_options_of_a_live_model():
    """All but those that the command has decided."""
    known = options_of(LLMOptions)
    live = set(known) - set(options_of(ModelFields))
    decided = {"gpu_memory_utilization", "prompt_logprobs", "num_speculative_tokens"}
    given = parsed().llm
    assert set(given) == live - decided
    assert given == {**{name: known[name].default for name in given}, "seed": 1234}


@pytest.mark.parametrize(
    ("line", "option", "value"),
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
def test_flags(line, option, value):
    assert parsed(line).llm[option] == value


def test_sampling():
    """The seed is the engine's: with one of the request, equal prompts would draw equal tokens."""
    given = parsed("--seed 5 --temperature 0.5 --top-k 3 --top-p 0.25")
    assert given.llm["seed"] == 5 and given.sampling.seed is None
    sampling = given.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 3, 0.25)
    assert (sampling.max_tokens, sampling.logprobs, sampling.ignore_eos) == (128, None, False)
    assert parsed().sampling.top_p == 1.0
    assert parsed("--greedy").sampling.is_greedy


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("--host-cache-tokens 5", "--host-cache-tokens must be an integer of at least 64, or 0"),
        ("--cache-tokens 63", "--cache-tokens must be an integer of at least 64, got 63"),
        (
            "--host-cache-tokens 640 --cuda-graphs",
            "--host-cache-tokens needs --cuda-graphs=False, got True",
        ),
        (
            "--prefix-cache-dir x --no-prefix-caching",
            "--prefix-cache-dir needs enable_prefix_caching=True, got False",
        ),
        ("--num-speculative-tokens 1", "unrecognized arguments: --num-speculative-tokens"),
        ("--lr 1", "unrecognized arguments: --lr"),
        ("--num-tokens-to-generate 0", f"--num-tokens-to-generate {ONE}"),
        ("--num-tokens-to-generate -3", f"--num-tokens-to-generate {ONE}"),
        ("--temperature -1", "--temperature must be at least 0"),
        ("--top-k -2", f"--top-k {ONE}"),
        ("--top-p 2", "--top-p must be above 0 and at most 1"),
        ("--greedy --top-k 2", "--greedy excludes"),
        ("--seed -1", "--seed must be at least 0"),
        ("--max-requests 0", f"--max-requests {ONE}"),
        ("--step-tokens 0", f"--step-tokens {ONE}"),
        ("--max-sequence-length 1", "--max-sequence-length must be an integer of at least 2"),
        ("--return-log-probs", "--return-log-probs needs --json"),
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size must be the number"),
        ("--sequence-parallel", "--sequence-parallel needs more than one process"),
        ("--prompt a --prompt-file x", "argument --prompt-file: not allowed with"),
        ("--prompt-file absent", "--prompt-file: there is no file absent"),
    ],
)
def test_refused(line, error):
    with pytest.raises(ValueError) as refused:
        parsed(line)
    assert str(refused.value).startswith(error)


@pytest.mark.parametrize(
    ("size", "error"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads 3 cannot be divided by"),
        ({"padded_vocab_size": 257}, "vocab_size 257 cannot be divided by the number of process"),
    ],
)
def test_models_that_the_processes_cannot_share(size, error):
    args = with_model(parsed(processes=2))
    vars(args).update({"padded_vocab_size": 320, **size})
    with pytest.raises(ValueError, match=error) as refused:
        check_model(args)
    commands = re.findall(r"absorbed-mla-convert (.+);", str(refused.value))
    assert len(commands) == ("padded_vocab_size" in size)
    for command in commands:
        assert command_line.parse_arguments(shlex.split(command)).source == Path("a folder")


@pytest.mark.parametrize(
    ("line", "processes", "error"),
    [
        ("--form expanded", 1, "--form auto or absorbed, got expanded"),
        ("--moe-token-dispatcher-type allgather", 1, "alltoall, got allgather"),
        ("", 1, None),
        ("--sequence-parallel", 2, None),
        ("--batch-invariant --bf16 --form absorbed", 2, None),
        # There are no tokens to dispatch.
        ("--num-experts 0 --moe-token-dispatcher-type allgather", 1, None),
    ],
)
def test_cuda_graphs(monkeypatch, line, processes, error):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # as far as the check looks
    args = with_model(parsed(f"--cuda-graphs {line}", processes))
    if error is None:
        check_graphs(args)
        return
    with pytest.raises(ValueError, match=error):
        check_graphs(args)
