"""Files of ranks that do not fit: one error that names everything, before anything is read."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from checkpoint_conversion.checkpoint_folder import RANK_FILE
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.legacy import LegacyCheckpoint
from tests.conversion.legacy_support import change_rank, save_rank, write_legacy
from tests.conversion.support import random_tensors, tiny_config


def problems_of(folder):
    """What is wrong with a checkpoint, from the headers."""
    with pytest.raises(CheckpointError) as error:
        LegacyCheckpoint(folder).hugging_face_tensors()
    return error.value.problems or (str(error.value),)


@pytest.fixture
def folder(tmp_path, config, tensors):
    write_legacy(tmp_path, config, tensors, tensor_parallel=2, pipeline_parallel=3)
    return tmp_path


def test_missing_and_extra_ranks(folder):
    inner = folder / "release"
    shutil.rmtree(inner / "mp_rank_00_001")
    (inner / "mp_rank_01_002" / RANK_FILE).unlink()
    shutil.copytree(inner / "mp_rank_00_000", inner / "mp_rank_07_000")
    problems = problems_of(folder)
    assert len(problems) == 3
    for name in ("mp_rank_00_001", "mp_rank_01_002", "mp_rank_07_000"):
        assert any(name in problem for problem in problems), name


def test_unknown_missing_and_misshapen_tensors(folder):
    norm = "decoder.layers.0.input_layernorm.weight"
    router = "decoder.layers.0.mlp.router.weight"
    proj = "decoder.layers.0.self_attention.linear_proj.weight"

    def change(content):
        model = content["model"]
        model["decoder.layers.0.input_layernrom.weight"] = model.pop(norm)
        model[router] = model[router][:, 1:].clone()
        model[proj] = model[proj].to(torch.int8)
        model["decoder.layers.0.note"] = "text"

    change_rank(folder / "release/mp_rank_01_001", change)
    problems = problems_of(folder)
    *problems, dtypes = problems
    assert len(problems) == 5
    assert all(problem.startswith("mp_rank_01_001: ") for problem in problems)
    assert "torch.bfloat16 and torch.int8 on different ranks" in dtypes
    assert any(f"{norm} is missing" in problem for problem in problems)
    assert any(f"the nearest known name is {norm}" in problem for problem in problems)
    assert any(f"{router} has shape (4, 31)" in problem for problem in problems)
    assert any(f"{proj} is torch.int8" in problem for problem in problems)
    assert any("note is no tensor but a str" in problem for problem in problems)


def test_ranks_of_other_dtypes(folder):
    def change(content):
        for name, value in content["model"].items():
            if value is not None and name.endswith("linear_proj.weight"):
                content["model"][name] = value.float()

    change_rank(folder / "release/mp_rank_01_001", change)
    (problem,) = problems_of(folder)
    assert problem == (
        "decoder.layers.1.self_attention.linear_proj.weight is torch.bfloat16 and "
        "torch.float32 on different ranks"
    )


def test_the_wrong_number_of_layers(folder):
    def change(content):
        content["model"] = {
            name: value for name, value in content["model"].items() if "layers" not in name
        }

    change_rank(folder / "release/mp_rank_00_001", change)
    change_rank(folder / "release/mp_rank_01_001", change)
    (problem,) = problems_of(folder)
    assert "hold 1, 0, 1 layers, together 2; the model has 3" in problem


def test_files_of_different_iterations(folder):
    change_rank(folder / "release/mp_rank_01_001", lambda content: content.update(iteration=3))
    problems = problems_of(folder)
    assert "mp_rank_01_001 is of iteration 3" in problems


def test_another_model(folder, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(
        json.dumps(
            {**tiny_config().hugging_face, "num_attention_heads": 8, "num_key_value_heads": 8}
        )
    )
    checkpoint = LegacyCheckpoint(folder, hf_config=path)
    with pytest.raises(CheckpointError) as error:
        checkpoint.hugging_face_tensors()
    # q_b, kv_b and o of every layer, on both tensor-parallel ranks.
    assert len(error.value.problems) == 3 * 3 * 2


def test_a_model_in_chunks(folder):
    def change(content):
        content["model0"] = content.pop("model")

    change_rank(folder / "release/mp_rank_00_000", change)
    with pytest.raises(CheckpointError, match="virtual_pipeline_model_parallel_size above 1"):
        LegacyCheckpoint(folder)


@pytest.mark.parametrize("content", [[1], {"args": None}, {"model": []}, {}])
def test_files_without_a_model(folder, content):
    save_rank(folder / "release/mp_rank_00_000", content)
    with pytest.raises(CheckpointError, match="mp_rank_00_000"):
        LegacyCheckpoint(folder)


def test_tensor_parallel_ranks_that_share_a_head(tmp_path):
    config = tiny_config()
    write_legacy(tmp_path, config, random_tensors(config), tensor_parallel=4)
    two_heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    path = tmp_path / "other.json"
    path.write_text(json.dumps({**config.hugging_face, **two_heads}))
    with pytest.raises(CheckpointError, match="4 tensor-parallel ranks cannot share") as error:
        LegacyCheckpoint(tmp_path, hf_config=path)
    assert error.value.problems == ("2 attention heads",)
