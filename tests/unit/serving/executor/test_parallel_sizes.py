"""Pipeline stages and ranks of experts: which processes ``LLM`` starts, and what it refuses."""

import pytest
import torch

from absorbed_mla import LLM, SamplingParams
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.weights.checkpoint import open_model, require_model
from absorbed_mla.serving.weights.load import load_model
from tests.conversion.support import random_tensors, tiny_config, write_hugging_face
from tests.support import needs
from tests.support.llm import tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("llm") / "model")


@pytest.mark.usefixtures("forked_python")
@needs.no_gpu
def test_processes_of_two_stages(folder):
    """They are started here, and generate what the whole model does in this process."""
    prompts, params = [[1, 2, 3], list(range(70))], SamplingParams(max_tokens=6, seed=1)
    with LLM(folder, pipeline_parallel_size=2, max_num_seqs=2) as llm:
        assert len(llm._runner.process_ids()) == 2
        found = llm.generate(prompts, params, use_tqdm=False)
        llm.require_no_leak()
    options = LLMOptions(tensor_parallel_size=1)
    model = load_model(open_model(folder), options, torch.device("cpu"))
    with LLM.from_model(model, max_num_seqs=2) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    assert [x.outputs[0].token_ids for x in found] == [x.outputs[0].token_ids for x in expected]


@pytest.mark.usefixtures("forked_python")
@needs.no_gpu
def test_processes_with_attention_of_their_own(folder):
    """Sampled tokens do not depend on which process gets a request."""
    prompts = [[1, 2, 3], list(range(70)), [4], list(range(100, 140)), [5, 6]]
    params = SamplingParams(max_tokens=6, top_p=0.9)
    options = {"tensor_parallel_size": 2, "data_parallel_attention": True, "max_num_seqs": 2}
    with LLM(folder, **options) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
        llm.require_no_leak()
        done = llm.statistics()
        # Nobody has anything to do meanwhile but one process.
        [alone] = llm.generate(prompts[1:2], params.replace(seed=1), use_tqdm=False)
    assert done.most_rows == 2 and done.steps > 12
    with LLM(folder, max_num_seqs=2) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
        [by_one] = llm.generate(prompts[1:2], params.replace(seed=1), use_tqdm=False)
    assert [x.outputs[0].token_ids for x in found] == [x.outputs[0].token_ids for x in expected]
    assert alone.outputs[0].token_ids == by_one.outputs[0].token_ids


@pytest.mark.parametrize(
    "given, count, expected",
    [
        ({}, None, 1),
        ({"expert_parallel_size": 4}, None, 4),
        ({"tensor_parallel_size": 8, "expert_parallel_size": 4}, None, 8),
        ({"pipeline_parallel_size": 2}, 8, 4),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, 8, 2),
    ],
)
def test_tensor_parallel_size(given, count, expected):
    options = LLMOptions(**given).for_processes(count)
    assert options.tensor_parallel_size == expected
    assert options.num_processes == expected * given.get("pipeline_parallel_size", 1)


@pytest.mark.parametrize(
    "given, count, error",
    [
        ({"pipeline_parallel_size": 0}, None, "pipeline_parallel_size must be an integer of at le"),
        ({"expert_parallel_size": 1.0}, None, "expert_parallel_size must be an integer of at leas"),
        (
            {"expert_parallel_size": 4, "tensor_parallel_size": 2},
            None,
            "expert_parallel_size must divide tensor_parallel_size 2, got 4",
        ),
        ({"expert_parallel_size": 3}, 2, "expert_parallel_size must divide tensor_parallel_size 2"),
        ({"pipeline_parallel_size": 3}, 4, "pipeline_parallel_size must divide torchrun's 4"),
        (
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 4},
            4,
            "tensor_parallel_size must divide torchrun's 4 processes, got 4 with 2 pipeline stages",
        ),
        (
            {"pipeline_parallel_size": 2, "cuda_graphs": True},
            None,
            "cuda_graphs needs pipeline_parallel_size=1, got 2",
        ),
        (
            {"decode_context_parallel": True},
            None,
            "decode_context_parallel=True needs tensor_parallel_size .* at least 2 .* got 1",
        ),
        (
            {"decode_context_parallel": True, "tensor_parallel_size": 2, "parity": True},
            None,
            "parity needs decode_context_parallel=False or 'auto', got True",
        ),
        (
            {"expert_parallel_size": 2, "cuda_graphs": True},
            None,
            "cuda_graphs needs expert_parallel_size=1, got 2",
        ),
    ],
)
def test_refused(given, count, error):
    with pytest.raises(ValueError, match=error):
        LLMOptions(**given).for_processes(count)


@pytest.mark.parametrize(
    "given, error",
    [
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size must be at most the model's 2"),
        ({"expert_parallel_size": 2}, "expert_parallel_size must divide the model's 0 experts"),
    ],
)
def test_refused_by_a_model(tmp_path, given, error):
    config = tiny_config(num_hidden_layers=2, first_k_dense_replace=2)
    folder = write_hugging_face(tmp_path / "model", config, random_tensors(config))
    with pytest.raises(ValueError, match=error):
        require_model(open_model(folder), LLMOptions(**given).for_processes(None))
