"""Every model type, trained and generating as transformers' own class does, in float32."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.formats.legacy import as_mapped
from checkpoint_conversion.layouts import canonical_tensors
from checkpoint_conversion.logits import load_megatron_model, megatron_model, one_process
from checkpoint_conversion.mapping import to_hugging_face
from checkpoint_conversion.model_type import MODELS, Refused
from tests.conversion.models import WHOLE, make_model, save, token_batch
from tests.conversion.support import change_json, in_memory, load_all
from tests.support import needs
from tests.unit.serving.weights.test_routing import by_llm, by_transformers, require_same

pytestmark = needs.no_gpu
_TOLERANCE = 1e-3
# Buffers, which have no gradient.
_BIAS = "e_score_correction_bias"


@dataclass(frozen=True)
class Case:
    """A model type, transformers' model of it, and the folder that it is saved in."""

    name: str
    model: Any
    folder: Path


@pytest.fixture(scope="module", params=WHOLE)
def case(request, tmp_path_factory) -> Case:
    model = make_model(WHOLE[request.param])
    folder = save(model, tmp_path_factory.mktemp("model") / "hf")
    if request.param == "kimi_k2":
        change_json(folder / "config.json", model_type="kimi_k2")
    return Case(request.param, model, folder)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def gradients_of_transformers(case: Case, tokens: Tensor, folder: Path) -> tuple[float, dict]:
    """Loss, and every weight's gradient by its name in files, which transformers writes."""
    loss = loss_of(case.model(tokens, use_cache=False).logits, tokens)
    loss.backward()
    with torch.no_grad():
        for weight in case.model.parameters():
            weight.copy_(0 if weight.grad is None else weight.grad)
    save(case.model, folder)
    return loss.item(), load_all(open_checkpoint(folder).hugging_face_tensors())


def gradients_of_megatron(case: Case, tokens: Tensor) -> tuple[float, dict]:
    checkpoint = open_checkpoint(case.folder)
    with one_process():
        model = megatron_model(checkpoint.config, "absorbed")
        load_megatron_model(model, checkpoint.config, checkpoint.hugging_face_tensors())
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        loss = loss_of(model(tokens, positions, None), tokens)
        loss.backward()
        found = dict(model.named_parameters())
        grads = {
            as_mapped(name): torch.zeros_like(tensor)
            if name not in found or found[name].grad is None
            else found[name].grad
            for name, tensor in model.state_dict().items()
            if tensor is not None
        }
    tensors = canonical_tensors(in_memory(grads), checkpoint.config)
    return loss.item(), load_all(to_hugging_face(tensors, checkpoint.config))


def test_generation(case):
    """Tokens and log-probabilities of prompts and answers."""
    require_same(by_llm(case.folder), by_transformers(case.model))


def test_training(case, tmp_path):
    """The loss, and its gradient by every weight. Last, since it overwrites the weights."""
    tokens = token_batch()
    loss, found = gradients_of_megatron(case, tokens)
    expected_loss, expected = gradients_of_transformers(case, tokens, tmp_path / "gradients")
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        if not name.endswith(_BIAS):
            error = (found[name] - gradient).norm()
            assert error <= _TOLERANCE * gradient.norm(), f"{name}: {error / gradient.norm()}"
            assert gradient.any() or "indexer" in name or ".experts." in name, name


def test_every_model_type():
    """That can be converted has a model here, of which the table in docs/support.md tells."""
    assert WHOLE.keys() == {model.name for model in MODELS if not isinstance(model, Refused)}
