"""Fixtures: a tiny model, its weights, and a Hugging Face folder of them."""

from pathlib import Path

import pytest
from torch import Tensor

from checkpoint_conversion.model import ModelConfig
from tests.conversion.support import random_tensors, tiny_config, write_hugging_face


@pytest.fixture
def config() -> ModelConfig:
    """A tiny DeepSeek-V3: a dense layer and two with experts."""
    return tiny_config()


@pytest.fixture
def tensors(config) -> dict[str, Tensor]:
    """Random weights of ``config`` under their Hugging Face names."""
    return random_tensors(config)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """The tiny model as a Hugging Face folder, which no test may change."""
    config = tiny_config()
    folder = tmp_path_factory.mktemp("tiny") / "hf"
    return write_hugging_face(folder, config, random_tensors(config))
