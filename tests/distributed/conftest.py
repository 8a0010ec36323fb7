"""Fixtures of tests with several processes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.distributed.whole import on_one_rank, shared_folder
from tests.support import world


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder that all processes see."""
    with shared_folder() as path:
        yield path


@pytest.fixture(scope="module")
def module_folder() -> Iterator[Path]:
    with shared_folder() as path:
        yield path


@pytest.fixture(scope="module")
def saved(module_folder) -> Callable[..., tuple[Path, list[list[int]]]]:
    """Makes, once for each architecture and ``changes`` of its config, a Hugging Face folder.

    Returns it and the tokens that transformers generates from ``llm.PROMPTS``.
    """
    from tests.conversion.models import Architecture, make_model, save
    from tests.distributed.llm import expected_tokens

    numbers = itertools.count()

    @functools.cache
    def make(architecture: Architecture, **changes):
        path = module_folder / str(next(numbers))

        def build():
            model = make_model(architecture, **changes)
            save(model, path)
            return expected_tokens(model)

        return path, on_one_rank(build)

    return make


@pytest.fixture(scope="module")
def drafting(module_folder) -> Path:
    """A Hugging Face folder with an MTP layer of random weights: few drafts are right."""
    from tests.conversion.support import random_tensors, tiny_config, write_hugging_face

    config = tiny_config(num_nextn_predict_layers=1, torch_dtype="float32")
    tensors = {k: v * 0.2 for k, v in random_tensors(config, torch.float32).items()}
    on_one_rank(lambda: write_hugging_face(module_folder / "mtp", config, tensors))
    return module_folder / "mtp"


@pytest.fixture(scope="module")
def whole_world_cp() -> Iterator[None]:
    """All processes are one context-parallel group."""
    with world.parallel(cp=world.size()):
        yield
