"""``LLM`` on checkpoints of every format, under tensor parallelism, as under torchrun.

Greedy tokens must be those of transformers' ``generate``; in parity mode a request's tokens must
not depend on what runs beside it, and drafts must change nothing. One rank of the same engine is
tested in tests/unit/serving, and in a process of its own in tests/unit/serving/executor.
"""

import contextlib
import json
import re
import sys

import pytest
from transformers import dynamic_module_utils

from absorbed_mla import LLM, StructuredOutputsParams
from absorbed_mla.export import LiveWeights
from absorbed_mla.serving.tokenizers.tokenizers import open_tokenizer
from checkpoint_conversion import cli
from tests.conversion.models import Architecture
from tests.distributed.llm import (
    GREEDY,
    NEW,
    PROMPTS,
    assert_parity,
    generated,
    sampled,
    token_ids,
)
from tests.distributed.whole import of_all_ranks, on_one_rank
from tests.support import needs, world
from tests.support.combinations import two_ranks, without
from tests.support.log_probs import ROUTED_FACTOR, assert_as_exact_as_bf16, written
from tests.support.tokenizers import byte_level

pytestmark = two_ranks

ARCHITECTURES = {
    "dense": (Architecture("v3", False, False, "rope"), {}),
    "experts": (Architecture("v3", True, True, "yarn"), {}),
    "v2": (Architecture("v2", True, True, "yarn"), {}),
    "tied": (Architecture("v3", True, False, "rope"), {"tie_word_embeddings": True}),
    # Two prompts are longer than top-k, or become so.
    "v3.2": (Architecture("v32", True, True, "yarn"), {}),
    "glm-5.2": (Architecture("glm5", True, False, "rope"), {}),
    # No multiple of any number of ranks.
    "odd-vocabulary": (Architecture("v3", True, False, "rope"), {"vocab_size": 131}),
}


@pytest.fixture(scope="module")
def model(saved):
    """By name, its Hugging Face folder and the expected tokens."""

    def make(name: str):
        architecture, changes = ARCHITECTURES[name]
        return saved(architecture, **{"vocab_size": 128, **changes})

    return make


# Ranks treat those that are left out as "experts"; structured outputs have the dense model's.
@pytest.mark.parametrize("name", without(ARCHITECTURES, "dense", "v2"))
def test_tokens_of_transformers(model, name):
    path, expected = model(name)
    assert generated(path) == expected


# Of the other format test_generate.py has the tokens.
@pytest.mark.parametrize("to", without(["megatron", "absorbed"], "absorbed"))
def test_converted(model, folder, to):
    path, expected = model("experts")
    words = ["convert", path, folder / to, "--to", to, "--force"]
    assert on_one_rank(lambda: cli.main(list(map(str, words)))) == 0
    assert generated(folder / to) == expected


def test_bfloat16_and_chunks(model):
    """With every option that changes the engine; bf16 is as far from fp32 as transformers' is."""
    path, expected = model("experts")
    options = {"max_num_batched_tokens": 56, "enable_prefix_caching": False}
    assert generated(path, form="expanded", **options) == expected
    options |= {"tensor_parallel_size": world.size(), "prompt_logprobs": True}
    with LLM(path, max_num_seqs=8, dtype="bfloat16", **options) as llm:
        texts = written(llm, PROMPTS, NEW)
    assert_as_exact_as_bf16(path, texts, world.device(), ROUTED_FACTOR)


@needs.processes(2)
def test_shared_cache(model):
    path, expected = model("experts")
    assert generated(path, decode_context_parallel=True, max_num_batched_tokens=56) == expected


@needs.processes(2)
@pytest.mark.parametrize("over", ["", "decode_context_parallel", "data_parallel_attention"])
def test_structured_outputs(model, over):
    """Every rank that samples has the same mask; requests beside them do not notice."""
    pytest.importorskip("llguidance")
    path, expected = model("dense")
    pattern = "[A-Z]{3}-[0-9]{4}(yes|no)"
    params = GREEDY.replace(temperature=2.0, seed=1, max_tokens=30, ignore_eos=False)
    params = params.replace(structured_outputs=StructuredOutputsParams(regex=pattern))
    mixed = [one for prompt in PROMPTS for one in (prompt, prompt)]
    options = {over: True} if over else {}
    sizes = {"tp": 1, "expert_tensor_parallel_size": 2} if "data" in over else {}
    with world.parallel(**sizes) if sizes else contextlib.nullcontext():
        found = generated(path, mixed, [GREEDY, params] * 3, tokenizer="bytes", **options)
    assert found[::2] == expected
    assert all(re.fullmatch(pattern, bytes(tokens).decode()) for tokens in found[1::2]), found


@needs.processes(2, 4)
@pytest.mark.parametrize(
    "name, groups",
    [("experts", 2), ("v3.2", 2), ("odd-vocabulary", 1)],
)
def test_data_parallel_attention(model, name, groups):
    """A front gives requests to the ranks, which have whole attention."""
    path, expected = model(name)
    parts = world.size() // groups
    options = {"data_parallel_attention": True, "expert_parallel_size": groups}
    with world.parallel(tp=1, expert_model_parallel_size=groups, expert_tensor_parallel_size=parts):
        assert generated(path, **options, max_num_batched_tokens=56) == expected


@needs.processes(2)
def test_data_parallel_attention_step_by_step(model):
    """Requests that are aborted or added meanwhile, a pause, and rounded latents."""
    path, expected = model("dense")
    options = {"data_parallel_attention": True, "tensor_parallel_size": 2, "max_num_seqs": 1}
    with world.parallel(tp=1, expert_tensor_parallel_size=2):
        with LLM(path, **options) as llm:
            for _ in range(2):
                names = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
                found = [llm.step() for _ in range(3)]
                llm.abort(names[2])
                ended = {}
                while llm.has_unfinished_requests():
                    ended |= {one.request_id: one for one in llm.step() if one.finished}
                ends = [ended[name].outputs[0].finish_reason for name in names[:2]]
                assert ends == ["length"] * 2
                assert token_ids(ended[name] for name in names[:2]) == expected[:2]
                assert len(found[0]) == 2, "one request on each rank"
                llm.require_no_leak()
                llm.sleep()
                llm.wake()
        assert all(map(len, generated(path, data_parallel_attention=True, dtype="bfloat16")))
        rounded = {"latent_cache_dtype": "fp8", "form": "absorbed"}
        assert all(map(len, generated(path, data_parallel_attention=True, **rounded)))


@pytest.mark.parametrize("name", ["experts", "tied"])
def test_update_weights(model, name):
    """Each rank takes its share of a model's weights that the same ranks hold."""
    path, expected = model(name)
    options = {"tensor_parallel_size": world.size(), "max_num_seqs": 8}
    with LLM(path, **options) as llm, LLM(path, **options) as other:
        for weight in llm._runner._model.parameters():
            weight.data.mul_(-1.5)
        names = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
        assert names and llm.step()
        llm.sleep(2)
        weights = LiveWeights(other._runner._model)
        llm.update_weights(weights)
        llm.wake()
        assert token_ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
        weights.shapes = weights.shapes[1:]
        with pytest.raises(ValueError, match="do not fit the model"):
            llm.update_weights(weights)


def test_drafts_change_nothing(drafting):
    """One MTP layer drafts several tokens, one after the other."""
    assert sampled(drafting, num_speculative_tokens=3) == sampled(drafting)


def test_drafts_need_a_layer(model):
    path, _ = model("dense")
    with pytest.raises(ValueError, match="num_speculative_tokens 1 needs a checkpoint with"):
        LLM(path, num_speculative_tokens=1)


# Importing it fails where another process does so at the same time.
CODE = """\
import os
import time
from transformers import PreTrainedTokenizerFast

os.mkdir({mark!r})
time.sleep(0.2)
os.rmdir({mark!r})

class Bytes(PreTrainedTokenizerFast):
    pass
"""


@needs.processes(2)
def test_code_of_a_tokenizer(folder, monkeypatch):
    """Ranks load it one after the other: they share the folder into which it is copied."""
    path = folder / "code"

    def build():
        byte_level().save_pretrained(path)
        (path / "code_of_bytes.py").write_text(CODE.format(mark=str(folder / "mark")))
        file = path / "tokenizer_config.json"
        fields = json.loads(file.read_text())
        fields |= {"auto_map": {"AutoTokenizer": [None, "code_of_bytes.Bytes"]}}
        file.write_text(json.dumps(fields))

    on_one_rank(build)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    encoded = byte_level().encode("fox")
    try:
        found = open_tokenizer(path, None, trust_remote_code=True).encode("fox")
    # The other rank waits for what it has.
    except ValueError as error:
        found = error
    assert of_all_ranks(str(found)) == [str(encoded)] * world.size()


def test_parity_mode(model):
    assert_parity(model("experts")[0], tensor_parallel_size=world.size())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size must divide"),
        ({"max_model_len": 10**6}, "max_model_len must be at most the model's"),
        pytest.param({"device": "cuda"}, "device 'cuda' needs a GPU", marks=needs.no_gpu),
        pytest.param(
            {"cuda_graphs": True}, "cuda_graphs needs a GPU, and there is none", marks=needs.no_gpu
        ),
        ({"tokenizer": "nowhere"}, "tokenizer must be a folder or 'bytes'"),
    ],
)
def test_refused(model, options, error):
    path, _ = model("dense")
    with pytest.raises(ValueError, match=error):
        LLM(path, **options)


def test_no_checkpoint(folder):
    with pytest.raises(ValueError, match="model must be a folder with a checkpoint"):
        LLM(folder / "nothing")
