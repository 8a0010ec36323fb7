"""``LLM`` over pipeline stages and ranks of experts: the tokens of transformers' ``generate``.

If a test fails, a rank has read another share of a checkpoint than its own.
"""

from __future__ import annotations

import functools

import pytest

from absorbed_mla import LLM, SamplingParams
from absorbed_mla.batch_invariant import disable_batch_invariant_mode
from tests.conversion.models import Architecture, make_model, save
from tests.conversion.support import random_tensors, tiny_config, write_hugging_face
from tests.distributed.test_llm import GREEDY, PROMPTS, expected_tokens, made_by_rank_0, token_ids
from tests.distributed.whole import shared_folder
from tests.support import needs, world
from tests.support.engine import prompt
from tests.support.pipeline import Model, load, whole_weights

pytestmark = [needs.processes(2), needs.no_gpu]

# Two layers on the first stage, one on the last.
LAYERS = {"num_hidden_layers": 3, "vocab_size": 131}
ARCHITECTURES = {
    "experts": (Architecture("v3", True, True, "yarn"), LAYERS),
    "tied": (Architecture("v3", True, False, "rope"), {**LAYERS, "tie_word_embeddings": True}),
}
# Options of LLM, and Megatron's sizes, which are those of this process already.
STAGES = (
    {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
)
EXPERTS = (
    {"expert_parallel_size": 2},
    {"tp": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
)


@pytest.fixture(scope="module")
def folder():
    with shared_folder() as path:
        yield path


@pytest.fixture(scope="module")
def saved(folder):
    """Per architecture, its Hugging Face folder and the tokens that transformers generates."""

    @functools.cache
    def make(name: str):
        def build():
            architecture, changes = ARCHITECTURES[name]
            model = make_model(architecture, **changes)
            save(model, folder / name)
            return expected_tokens(model)

        return folder / name, made_by_rank_0(build)

    return make


def generated(path, layout, prompts=PROMPTS, params=GREEDY, **options) -> list[list[int]]:
    given, sizes = layout
    with world.parallel(**sizes), LLM(path, max_num_seqs=8, **given, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.require_no_leak()
        return token_ids(outputs)


@pytest.mark.parametrize(
    "name, layout",
    [("experts", STAGES), ("experts", EXPERTS), ("tied", STAGES)],
    ids=["experts-pp", "experts-ep", "tied-pp"],
)
def test_tokens_of_transformers(saved, name, layout):
    path, expected = saved(name)
    assert generated(path, layout) == expected


@pytest.mark.parametrize("layout", [STAGES, EXPERTS], ids=["pp", "ep"])
def test_drafts_and_chunks(folder, layout):
    """The MTP layer is on the last stage, which needs the embedding, too."""
    path = folder / "mtp"

    def build():
        config = tiny_config(num_nextn_predict_layers=1, torch_dtype="float32")
        tensors = {k: v * 0.2 for k, v in random_tensors(config).items()}
        write_hugging_face(path, config, tensors)

    if not path.exists():
        made_by_rank_0(build)
    prompts = [[token % 64 for token in one] for one in PROMPTS]
    params = [GREEDY, GREEDY.replace(temperature=0.7, seed=1), GREEDY.replace(top_p=0.5, seed=2)]
    expected = generated(path, ({"tensor_parallel_size": 1}, {}), prompts, params)
    options = {"num_speculative_tokens": 2, "max_num_batched_tokens": 64}
    assert generated(path, layout, prompts, params, **options) == expected


@pytest.mark.parametrize(
    "options, error",
    [
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size must divide torchrun's 2"),
        (
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
            "tensor_parallel_size must divide torchrun's 2 processes, got 2 with 2 pipeline stages",
        ),
        ({"expert_parallel_size": 2, "tensor_parallel_size": 1}, "expert_parallel_size must divide"),
    ],
)
def test_refused(saved, options, error):
    with pytest.raises(ValueError, match=error):
        LLM(saved("experts")[0], **options)
