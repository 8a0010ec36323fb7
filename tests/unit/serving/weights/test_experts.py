"""Which experts a loaded model has, and that their weights are the checkpoint's."""

import logging
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from absorbed_mla import LLM, SamplingParams
from absorbed_mla.log_once import times_logged
from absorbed_mla.serving.experts.experts import GroupedExperts
from absorbed_mla.serving.export import hf_weights
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.weights import load
from absorbed_mla.serving.weights.checkpoint import open_model
from absorbed_mla.serving.weights.load import load_model
from checkpoint_conversion.lazy_tensor import ReadSession
from tests.conversion.support import random_tensors, tiny_config, write_hugging_face
from tests.support import needs
from tests.support.experts import generated_and_trained
from tests.support.llm import tiny_folder

pytestmark = [needs.no_gpu, pytest.mark.usefixtures("forked_python")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return open_model(tiny_folder(tmp_path_factory.mktemp("tiny") / "model"))


def loaded(checkpoint, **options):
    given = LLMOptions(tensor_parallel_size=1, **options)
    return load_model(checkpoint, given, torch.device("cpu"))


def experts_of(model) -> set[type]:
    return {type(module) for module in model.modules() if isinstance(module, SequentialMLP)}


def test_grouped(checkpoint, caplog):
    times_logged.cache_clear()
    with caplog.at_level(logging.INFO, "absorbed_mla.serving.weights.load"):
        model = loaded(checkpoint)
    assert experts_of(model) == {GroupedExperts}
    assert "experts are computed grouped" in caplog.messages
    wanted = checkpoint.hugging_face_tensors()
    found = dict(hf_weights(model))
    assert any(".experts.1." in name for name in found)
    for name, weight in found.items():
        with ReadSession() as session:
            assert torch.equal(weight, wanted[name].load(session)), name


def test_bfloat16(checkpoint):
    """Rounded before they are set."""
    model = loaded(checkpoint, dtype="bfloat16")
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            assert module._is_stacked() and module._weights[0].dtype == torch.bfloat16


def of_many_experts(folder, **fields):
    """A checkpoint whose tokens choose four of eight experts: their sums depend on the order."""
    config = tiny_config(
        vocab_size=257,
        num_hidden_layers=2,
        n_routed_experts=8,
        **{"num_experts_per_tok": 4, "topk_group": 2, "torch_dtype": "float32", **fields},
    )
    tensors = {name: x * 0.3 for name, x in random_tensors(config, torch.float32).items()}
    return write_hugging_face(folder, config, tensors)


def generated(folder, *batches: list[list[int]], **options) -> list[tuple]:
    """Tokens and log-probs that parity mode gives the prompts of each batch, one after another."""
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=0)
    with LLM(folder, tokenizer="bytes", parity=True, **options) as llm:
        done = [one for each in batches for one in llm.generate(each, params, use_tqdm=False)]
    outputs = [one.outputs[0] for one in done]
    return [
        (one.token_ids, [at[t].logprob for t, at in zip(one.token_ids, one.logprobs)])
        for one in outputs
    ]


by_parts = pytest.mark.parametrize("parts", [None, 4], ids=["whole", "parts"])


@by_parts
@pytest.mark.parametrize(
    "fields",
    [{}, {"n_group": 4, "num_experts_per_tok": 3, "norm_topk_prob": False}],
    ids=["Megatron's router", "ours"],
)
def test_parity_mode(tmp_path, fields, parts):
    """Grouped or one after the other, alone or together: equal to the bit."""
    folder = of_many_experts(tmp_path / "model", **fields)
    prompts = [[7, 3, 90], list(range(1, 40)), list(range(200, 212))]
    mode = {"tensor_parallel_parts": parts}
    expected = generated(folder, prompts, experts="sequential", **mode)
    found = generated(folder, prompts, prompts[1:2], experts="grouped", **mode)
    assert found == [*expected, expected[1]]


@by_parts
def test_logits_of_training(tmp_path, parts):
    checkpoint = open_model(of_many_experts(tmp_path / "model"))
    found, expected = generated_and_trained(checkpoint, torch.device("cpu"), parts)
    assert torch.equal(found, expected)


@by_parts
def test_parity_mode_is_grouped(checkpoint, caplog, parts):
    times_logged.cache_clear()
    with caplog.at_level(logging.INFO, "absorbed_mla.serving.weights.load"):
        model = loaded(checkpoint, parity=True, tensor_parallel_parts=parts)
    assert experts_of(model) == {GroupedExperts}
    assert "experts are computed grouped" in caplog.messages


class TestParityModeOfSeveralRanks:
    """They would add up their sums in another order than Megatron's."""

    @pytest.fixture(autouse=True)
    def _two(self, monkeypatch):
        group = SimpleNamespace(size=lambda: 2)
        name = "get_expert_tensor_and_model_parallel_group"
        monkeypatch.setattr(load.parallel_state, name, lambda **_: group)

    def test_auto(self, checkpoint, caplog):
        times_logged.cache_clear()
        with caplog.at_level(logging.INFO, "absorbed_mla.serving.weights.load"):
            assert not load._groups_experts(*self.request(checkpoint, "auto"))
        [message] = caplog.messages
        assert message.startswith("experts are computed one after the other: in parity mode ranks")

    def test_grouped(self, checkpoint):
        with pytest.raises(ValueError, match="got 'grouped': in parity mode ranks that share"):
            load._groups_experts(*self.request(checkpoint, "grouped"))

    def request(self, checkpoint, experts: str) -> tuple:
        options = LLMOptions(parity=True, experts=experts)
        return checkpoint.config, options, torch.device("cpu"), torch.float32


def test_sequential(checkpoint):
    assert experts_of(loaded(checkpoint, experts="sequential")) == {SequentialMLP}


def test_grouped_without_experts(tmp_path):
    config = tiny_config(num_hidden_layers=1, first_k_dense_replace=1)
    tensors = random_tensors(config, torch.float32)
    dense = open_model(write_hugging_face(tmp_path / "dense", config, tensors))
    with pytest.raises(ValueError, match="got 'grouped': the model has no experts"):
        loaded(dense, experts="grouped")
