"""Which experts a loaded model has, and that their weights are the checkpoint's."""

from __future__ import annotations

import logging

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from absorbed_mla.experts.experts import GroupedExperts
from absorbed_mla.export import hf_weights
from absorbed_mla.llm.load import load_model, open_model
from absorbed_mla.llm.options import LLMOptions
from absorbed_mla.log_once import times_logged
from checkpoint_conversion.lazy_tensor import ReadSession
from tests.conversion.support import random_tensors, tiny_config, write_hugging_face
from tests.support import needs
from tests.support.llm import tiny_folder

pytestmark = needs.no_gpu


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
    with caplog.at_level(logging.INFO, "absorbed_mla.llm.load"):
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


def test_parity_mode(checkpoint, caplog):
    """No grouped product is known to be independent of the batch."""
    times_logged.cache_clear()
    with caplog.at_level(logging.INFO, "absorbed_mla.llm.load"):
        assert experts_of(loaded(checkpoint, parity=True)) == {SequentialMLP}
    [message] = [m for m in caplog.messages if m.startswith("experts are computed")]
    assert message.startswith("experts are computed one after the other: in parity mode")


def test_sequential(checkpoint):
    assert experts_of(loaded(checkpoint, experts="sequential")) == {SequentialMLP}


def test_grouped_in_parity_mode():
    """Refused before a model is loaded."""
    with pytest.raises(ValueError, match="parity needs experts 'sequential' or 'auto', got 'group"):
        LLMOptions(experts="grouped", parity=True)


def test_grouped_without_experts(tmp_path):
    config = tiny_config(num_hidden_layers=1, first_k_dense_replace=1)
    tensors = random_tensors(config, torch.float32)
    dense = open_model(write_hugging_face(tmp_path / "dense", config, tensors))
    with pytest.raises(ValueError, match="got 'grouped': the model has no experts"):
        loaded(dense, experts="grouped")
