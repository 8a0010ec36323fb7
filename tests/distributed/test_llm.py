"""``LLM`` on checkpoints of every format, under tensor parallelism, as under torchrun.

Greedy tokens must be those of transformers' ``generate``; in parity mode a request's tokens must
not depend on what runs beside it, and drafts must change nothing. One rank of the same engine is
tested in tests/unit/serving, and in a process of its own in tests/unit/serving/executor.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import dynamic_module_utils

from absorbed_mla import LLM, SamplingParams
from absorbed_mla.batch_invariant import disable_batch_invariant_mode
from absorbed_mla.serving.tokenizers.tokenizers import open_tokenizer
from checkpoint_conversion import cli
from tests.conversion.models import Architecture, make_model, save
from tests.conversion.support import random_tensors, tiny_config, write_hugging_face
from tests.distributed.whole import shared_folder
from tests.support import needs, world
from tests.support.combinations import two_ranks
from tests.support.log_probs import ROUTED_FACTOR, assert_as_exact_as_bf16, written
from tests.support.tokenizers import byte_level

pytestmark = two_ranks

NEW = 10
# Shorter and longer than a block of the cache.
PROMPTS = [list(b"An"), list(b"the quick brown fox"), list(range(32, 102))]
GREEDY = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
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


def expected_tokens(model) -> list[list[int]]:
    """What transformers generates greedily."""
    found = []
    for prompt in PROMPTS:
        text = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(text[0, len(prompt) :].tolist())
    return found


def made_by_rank_0(function):
    """What ``function`` returns there, on all ranks."""
    box = [function() if world.rank() == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


@pytest.fixture(scope="module")
def folder():
    with shared_folder() as path:
        yield path


@pytest.fixture(scope="module")
def saved(folder):
    """Per architecture, its Hugging Face folder and the expected tokens, made when asked for."""
    made: dict = {}

    def make(name: str):
        def build():
            architecture, changes = ARCHITECTURES[name]
            model = make_model(architecture, **{"vocab_size": 128, **changes})
            save(model, folder / name)
            return expected_tokens(model)

        if name not in made:
            made[name] = made_by_rank_0(build)
        return folder / name, made[name]

    return make


def token_ids(outputs) -> list[list[int]]:
    return [one.token_ids for output in outputs for one in output.outputs]


def generated(path, prompts=PROMPTS, params=GREEDY, **options) -> list[list[int]]:
    """By ``LLM``, whose blocks must all be free at the end."""
    with LLM(path, max_num_seqs=8, tensor_parallel_size=world.size(), **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.require_no_leak()
        return token_ids(outputs)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_of_transformers(saved, name):
    path, expected = saved(name)
    assert generated(path) == expected


@pytest.mark.parametrize("to", ["megatron", "absorbed"])
def test_converted(saved, folder, to):
    path, expected = saved("experts")
    words = ["convert", path, folder / to, "--to", to, "--force"]
    assert made_by_rank_0(lambda: cli.main(list(map(str, words)))) == 0
    assert generated(folder / to) == expected


def test_bfloat16_and_chunks(saved):
    """With every option that changes the engine; bf16 is as far from fp32 as transformers' is."""
    path, expected = saved("experts")
    options = {"max_num_batched_tokens": 56, "enable_prefix_caching": False}
    assert generated(path, form="expanded", **options) == expected
    options |= {"tensor_parallel_size": world.size(), "prompt_logprobs": True}
    with LLM(path, max_num_seqs=8, dtype="bfloat16", **options) as llm:
        texts = written(llm, PROMPTS, NEW)
    assert_as_exact_as_bf16(path, texts, world.device(), ROUTED_FACTOR)


@needs.processes(2)
def test_shared_cache(saved):
    path, expected = saved("experts")
    assert generated(path, decode_context_parallel=True, max_num_batched_tokens=56) == expected


@needs.processes(2, 4)
@pytest.mark.parametrize(
    "name, groups",
    [("experts", 1), ("experts", 2), ("tied", 1), ("v3.2", 2), ("odd-vocabulary", 1)],
)
def test_data_parallel_attention(saved, name, groups):
    """A front gives requests to the ranks, which have whole attention."""
    path, expected = saved(name)
    parts = world.size() // groups
    options = {"data_parallel_attention": True, "expert_parallel_size": groups}
    with world.parallel(tp=1, expert_model_parallel_size=groups, expert_tensor_parallel_size=parts):
        assert generated(path, **options, max_num_batched_tokens=56) == expected


@needs.processes(2)
def test_data_parallel_attention_step_by_step(saved):
    """Requests that are aborted or added meanwhile, a pause, and rounded latents."""
    path, expected = saved("dense")
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
                assert [ended[name].outputs[0].finish_reason for name in names[:2]] == [
                    "length"
                ] * 2
                assert token_ids(ended[name] for name in names[:2]) == expected[:2]
                assert len(found[0]) == 2, "one request on each rank"
                llm.require_no_leak()
                llm.sleep()
                llm.wake()
        assert all(map(len, generated(path, data_parallel_attention=True, dtype="bfloat16")))
        rounded = {"latent_cache_dtype": "fp8", "form": "absorbed"}
        assert all(map(len, generated(path, data_parallel_attention=True, **rounded)))


@pytest.fixture(scope="module")
def drafting(folder):
    """A folder with an MTP layer, whose weights are random: few drafts are right."""
    path = folder / "mtp"

    def build():
        config = tiny_config(num_nextn_predict_layers=1, torch_dtype="float32")
        tensors = {k: v * 0.2 for k, v in random_tensors(config, torch.float32).items()}
        write_hugging_face(path, config, tensors)

    made_by_rank_0(build)
    return path


@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts_change_nothing(drafting, drafts):
    """One MTP layer drafts several tokens, one after the other."""
    prompts = [[token % 64 for token in prompt] for prompt in PROMPTS]
    params = [GREEDY, GREEDY.replace(temperature=0.7, seed=1), GREEDY.replace(top_p=0.5, seed=2)]
    plain = generated(drafting, prompts, params)
    assert generated(drafting, prompts, params, num_speculative_tokens=drafts) == plain


def test_drafts_need_a_layer(saved):
    path, _ = saved("dense")
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

    made_by_rank_0(build)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    encoded = byte_level().encode("fox")
    try:
        found = open_tokenizer(path, None, trust_remote_code=True).encode("fox")
    # The other rank waits for what it has.
    except ValueError as error:
        found = error
    of_ranks = [None] * world.size()
    dist.all_gather_object(of_ranks, str(found))
    assert of_ranks == [str(encoded)] * world.size()


def assert_parity(path: Path, params: list[SamplingParams], **sizes) -> None:
    """Three prompts have the same tokens alone and all together, twice, in chunks and evicted."""
    # They need a second block of the cache at about the same time.
    prompts = [list(range(start, start + 54 + 2 * start)) for start in (1, 2, 3)]
    options = {"parity": True, "max_num_seqs": 8, **sizes}
    if needs.HAS_GPU:  # whose kernels have no fp32
        options["dtype"] = "bfloat16"
    try:
        with LLM(path, **options) as llm:
            alone = [
                token_ids(llm.generate([prompt], one, use_tqdm=False))[0]
                for prompt, one in zip(prompts, params, strict=True)
            ]
        with LLM(path, **options, max_num_batched_tokens=56, cache_tokens=320) as llm:
            together = llm.generate([*prompts, *prompts], [*params, *params], use_tqdm=False)
            assert llm.statistics().evicted + llm.statistics().most_paused
    finally:
        disable_batch_invariant_mode()
    assert token_ids(together) == [*alone, *alone]


def test_parity_mode(saved):
    """Sampled, alone and all together, in chunks and evicted."""
    path, _ = saved("experts")
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, seed=i, **more)
        for i, more in enumerate(
            [{}, {"top_p": 0.9, "temperature": 1.3}, {"min_p": 0.05, "frequency_penalty": 0.5}]
        )
    ]
    assert_parity(path, params, tensor_parallel_size=world.size())


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
def test_refused(saved, options, error):
    path, _ = saved("dense")
    with pytest.raises(ValueError, match=error):
        LLM(path, **options)


def test_no_checkpoint(folder):
    with pytest.raises(ValueError, match="model must be a folder with a checkpoint"):
        LLM(folder / "nothing")
