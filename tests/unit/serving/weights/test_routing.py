"""Routings that Megatron's router does not compute, in ``LLM``: transformers' log-probs, fp32."""

import functools
import logging
import os
from unittest import mock

import pytest
import torch

from absorbed_mla import LLM, SamplingParams
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.weights import load
from absorbed_mla.serving.weights.checkpoint import open_model
from absorbed_mla.serving.weights.load import load_model
from checkpoint_conversion.convert import convert
from checkpoint_conversion.errors import CheckpointError
from tests.conversion.models import VOCABULARY, Architecture, make_model, save
from tests.support import needs
from tests.support.combinations import without

pytestmark = needs.no_gpu
transformers = pytest.importorskip("transformers")

_PROMPTS = [
    torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (30, 7)
]
_NEW = 4
_GROUPS = {"topk_method": "group_limited_greedy", "n_routed_experts": 16}
# Of float32 logits that were summed in another order.
_TOLERANCE = 1e-4
# Family, fields of config.json.
ROUTINGS = {
    "V2, 236B": ("v2", {**_GROUPS, "n_group": 8, "topk_group": 3, "num_experts_per_tok": 6}),
    "V2, one expert": ("v2", {**_GROUPS, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 1}),
    "V2, a field that is ignored": ("v2", {"num_experts_per_tok": 3, "norm_topk_prob": True}),
    "V3, best two of three": (
        "v3",
        {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 6},
    ),
    "V3, one expert": ("v3", {"num_experts_per_tok": 1}),
    "V3, one expert, not normalised": ("v3", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    "V3, not normalised": ("v3", {"num_experts_per_tok": 4, "norm_topk_prob": False}),
    "V3, all experts": ("v3", {"num_experts_per_tok": 8, "n_group": 2, "topk_group": 1}),
    "GLM, not normalised": ("glm", {"num_experts_per_tok": 3, "norm_topk_prob": False}),
    "V3.2, three of a group": ("v32", {"num_experts_per_tok": 3}),
    "GLM-5, not normalised": ("glm5", {"num_experts_per_tok": 3, "norm_topk_prob": False}),
}
# Made of what two of the others have.
_OF_TWO = ("V2, one expert", "V3, one expert, not normalised", "V3, all experts")
_OF_TWO += ("GLM, not normalised",)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By name of a routing, transformers' model and its folder."""

    @functools.cache
    def made(name):
        family, fields = ROUTINGS[name]
        model = make_model(Architecture(family, True, True, "rope"), **fields)
        return model, save(model, tmp_path_factory.mktemp("hf") / "model")

    return made


@functools.cache
def by_transformers(model) -> list[tuple[list[int], torch.Tensor]]:
    """Greedy tokens after each prompt, and log-probs of all tokens but the first."""
    found = []
    for prompt in _PROMPTS:
        tokens = list(prompt)
        for _ in range(_NEW):
            with torch.no_grad():
                scores = model(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
            tokens.append(int(scores[-1].argmax()))
        chosen = torch.tensor(tokens[1:])[:, None]
        found.append((tokens[len(prompt) :], scores.gather(1, chosen)[:, 0]))
    return found


def by_llm(folder, **options) -> list[tuple[list[int], torch.Tensor]]:
    """Of ``LLM`` as under torchrun: in this process, which is a rank already."""
    params = SamplingParams(
        max_tokens=_NEW, temperature=0, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "dtype": "float32"}
    sizes |= {"tokenizer": "bytes", "prompt_logprobs": True}
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with mock.patch.dict(os.environ, rank), LLM(folder, **sizes, **options) as llm:
        outputs = llm.generate(_PROMPTS, params, use_tqdm=False)
    found = []
    for prompt, output in zip(_PROMPTS, outputs):
        [text] = output.outputs
        pairs = [*zip(prompt[1:], output.prompt_logprobs[1:]), *zip(text.token_ids, text.logprobs)]
        found.append((text.token_ids, torch.tensor([at[token].logprob for token, at in pairs])))
    return found


@pytest.mark.parametrize("name", without(ROUTINGS, *_OF_TWO))
def test_as_transformers(saved, name):
    """Every token of prompts and answers."""
    model, folder = saved(name)
    require_same(by_llm(folder), by_transformers(model))


@pytest.mark.parametrize("name", ["V2, 236B", "V3, not normalised"])
def test_experts_one_after_the_other(saved, name):
    model, folder = saved(name)
    require_same(by_llm(folder, experts="sequential"), by_transformers(model))


def require_same(found, expected) -> None:
    for (tokens, logprobs), (wanted, exact) in zip(found, expected, strict=True):
        assert tokens == wanted
        torch.testing.assert_close(logprobs, exact, rtol=0, atol=_TOLERANCE)


@pytest.mark.parametrize("to", ["absorbed", "megatron"])
def test_converted(saved, tmp_path, to):
    """Also of a checkpoint whose arguments alone say what the model is."""
    model, folder = saved("V2, 236B")
    convert(folder, tmp_path / to, to)
    (tmp_path / to / "release" / "hugging_face" / "config.json").unlink()
    require_same(by_llm(tmp_path / to), by_transformers(model))


def test_a_field_that_is_ignored_is_named(saved, caplog):
    _, folder = saved("V2, a field that is ignored")
    with caplog.at_level(logging.WARNING, "absorbed_mla.serving.weights.load"):
        load_model(open_model(folder), LLMOptions(tensor_parallel_size=1), torch.device("cpu"))
    [message] = [record.message for record in caplog.records if record.name == load.__name__]
    assert message.startswith("norm_topk_prob is true: transformers ignores the field")


def test_experts_of_other_groups_are_refused(tmp_path):
    """Transformers would take any of them."""
    model = make_model(Architecture("v3", True, True, "rope"), num_experts_per_tok=5)
    folder = save(model, tmp_path / "hf")
    with pytest.raises(CheckpointError, match="at most the 4 experts of topk_group 1, got 5"):
        open_model(folder)
