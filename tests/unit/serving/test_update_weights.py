"""New weights for a loaded ``LLM``: from memory, in the middle of requests, refused, asleep."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from absorbed_mla import LLM, SamplingParams
from absorbed_mla.export import LiveWeights, WeightSender
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.weights.load import load_model, open_model
from checkpoint_conversion.lazy_tensor import ReadSession
from tests.conversion.support import random_tensors, tiny_config, write_hugging_face
from tests.support import needs
from tests.support.llm import tiny_folder

pytestmark = [needs.no_gpu, pytest.mark.usefixtures("forked_python")]

OPTIONS = {"tokenizer": "bytes", "max_num_seqs": 4, "parity": True}
PROMPTS = [list(range(7, 80)), [3, 200, 5]]
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=0)


class Tensors:
    """Weights as ``LiveWeights`` gives them, of a dict."""

    device = torch.device("cpu")

    def __init__(self, tensors: dict[str, torch.Tensor], most: int | None = None) -> None:
        self.tensors, self._most = tensors, most
        self.shapes = [(name, x.dtype, tuple(x.shape)) for name, x in tensors.items()]

    def __iter__(self):
        yield from [*self.tensors.items()][: self._most]


def tensors_of(folder) -> dict[str, torch.Tensor]:
    found = open_model(folder).hugging_face_tensors()
    with ReadSession() as session:
        return {name: lazy.load(session).clone() for name, lazy in found.items()}


def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Other weights of the same model."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: x + 0.2 * x.std(correction=0) * torch.randn(x.shape, generator=generator)
        for name, x in tensors.items()
    }


def outputs_of(llm, prompts=PROMPTS, params=PARAMS) -> list[tuple]:
    """Tokens and log-probabilities."""
    outputs = [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]
    return [(one.token_ids, one.token_logprobs) for one in outputs]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two checkpoints of one model, with an MTP layer."""
    root = tmp_path_factory.mktemp("tiny")
    old = tiny_folder(root / "old", num_nextn_predict_layers=1)
    config = open_model(old).config
    return old, write_hugging_face(root / "new", config, changed(tensors_of(old)))


@pytest.fixture(scope="module")
def new(folders) -> dict[str, torch.Tensor]:
    return tensors_of(folders[1])


@pytest.fixture(scope="module")
def expected(folders) -> tuple[list[tuple], list[tuple]]:
    """What models that were loaded from each checkpoint generate."""
    found = []
    for folder in folders:
        with LLM(folder, **OPTIONS) as llm:
            found.append(outputs_of(llm))
    assert found[0] != found[1]
    return tuple(found)


@pytest.fixture(scope="module")
def llm(folders):
    with LLM(folders[0], **OPTIONS) as made:
        yield made


@pytest.fixture
def old(llm, folders):
    """With the weights of its checkpoint."""
    llm.wake()
    llm.update_weights(Tensors(tensors_of(folders[0])))
    return llm


def test_equal_to_a_fresh_model(old, new, expected):
    assert outputs_of(old) == expected[0]
    old.update_weights(Tensors(new))
    assert outputs_of(old) == expected[1]
    old.require_no_leak()
