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
    assert len(problems) == 5
    both = "mp_rank_00_001, mp_rank_01_001"
    for expected in (
        "mp_rank_01_001: decoder.layers.0.note is no tensor but a str",
        f"{norm} is missing in mp_rank_01_001",
        "input_layernrom.weight is missing in mp_rank_00_001",
        f"{router} of {both} is torch.bfloat16 (4, 31) and torch.bfloat16 (4, 32)",
        f"{proj} of {both} is torch.bfloat16 (32, 40) and torch.int8 (32, 40)",
    ):
        assert any(expected in problem for problem in problems), expected


def test_what_all_ranks_lack(folder):
    """One line for the model, with the nearest name."""
    norm = "decoder.layers.0.input_layernorm.weight"

    def change(content):
        model = content["model"]
        model["decoder.layers.0.input_layernrom.weight"] = model.pop(norm)

    for rank in ("00", "01"):
        change_rank(folder / f"release/mp_rank_{rank}_001", change)
    missing, unknown = problems_of(folder)
    assert missing.startswith("decoder.layers.1.input_layernorm.weight is missing")
    assert "the nearest known name is decoder.layers.1.input_layernorm.weight" in unknown


def proj_in_float32(content):
    for name, value in content["model"].items():
        if value is not None and name.endswith("linear_proj.weight"):
            content["model"][name] = value.float()


def without_layers(content):
    content["model"] = {k: v for k, v in content["model"].items() if "layers" not in k}


@pytest.mark.parametrize(
    ("change", "ranks", "expected"),
    [
        (
            proj_in_float32,
            ["01_001"],
            "decoder.layers.0.self_attention.linear_proj.weight of mp_rank_00_001, mp_rank_01_001 "
            "is torch.bfloat16 (32, 40) and torch.float32 (32, 40) on different ranks",
        ),
        (
            without_layers,
            ["00_001", "01_001"],
            "hold 1, 0, 1 layers, together 2; the model has 3",
        ),
        (
            lambda content: content.update(iteration=3),
            ["01_001"],
            "mp_rank_01_001 is of iteration 3",
        ),
        (
            lambda content: content.update(model0=content.pop("model")),
            ["00_000"],
            "virtual_pipeline_model_parallel_size above 1",
        ),
    ],
    ids=["other dtypes", "number of layers", "iterations", "model in chunks"],
)
def test_ranks_that_do_not_fit(folder, change, ranks, expected):
    for rank in ranks:
        change_rank(folder / f"release/mp_rank_{rank}", change)
    assert any(expected in problem for problem in problems_of(folder))


def test_another_model(tmp_path, config, tensors):
    write_legacy(tmp_path, config, tensors, tensor_parallel=2)
    other = {"num_attention_heads": 8, "num_key_value_heads": 8}
    path = tmp_path / "other.json"
    path.write_text(json.dumps({**config.hugging_face, **other}))
    with pytest.raises(CheckpointError) as error:
        LegacyCheckpoint(tmp_path, hf_config=path).hugging_face_tensors()
    # q_b, kv_b and o of every layer.
    assert len(error.value.problems) == 3 * 3
    assert all(" has shape " in problem for problem in error.value.problems)


@pytest.mark.parametrize("content", [[1], {"args": None}, {"model": []}, {}])
def test_files_without_a_model(folder, content):
    save_rank(folder / "release/mp_rank_00_000", content)
    with pytest.raises(CheckpointError, match="mp_rank_00_000"):
        LegacyCheckpoint(folder)
