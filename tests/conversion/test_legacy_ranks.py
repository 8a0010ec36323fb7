"""Arithmetic of ranks and names, without files."""

from __future__ import annotations

import pytest

from checkpoint_conversion.checkpoint_folder import is_rank_folder
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.legacy import (
    _DECODER_LAYER,
    _count,
    _whole_name,
)
from checkpoint_conversion.formats.legacy_ranks import (
    Rank,
    Sizes,
    folder_problems,
    sizes_of,
)


@pytest.mark.parametrize(
    ("sizes", "rank", "folder"),
    [
        (Sizes(1, 1, 1), Rank(0, 0, 0), "mp_rank_00"),
        (Sizes(128, 1, 1), Rank(117, 0, 0), "mp_rank_117"),
        (Sizes(2, 4, 1), Rank(1, 3, 0), "mp_rank_01_003"),
        (Sizes(2, 1, 8), Rank(1, 0, 7), "mp_rank_01_007"),
        (Sizes(2, 4, 8), Rank(1, 2, 7), "mp_rank_01_002_007"),
    ],
)
def test_folders_have_megatrons_names(sizes, rank, folder):
    assert sizes.folder(rank) == folder
    assert is_rank_folder(folder)


@pytest.mark.parametrize("name", ["mp_rank_0", "mp_rank_00_1", "mp_rank_00_000_000_000", "rank_00"])
def test_other_folders_are_no_ranks(name):
    assert not is_rank_folder(name)


def args(tensor=1, pipeline=1, expert=1, **others):
    return {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "expert_model_parallel_size": expert,
        **others,
    }


def test_the_second_number_is_what_the_args_say():
    """The same folders can be two pipeline stages or two expert-parallel ranks."""
    folders = ["mp_rank_00_000", "mp_rank_00_001"]
    assert sizes_of(args(pipeline=2), folders) == Sizes(1, 2, 1)
    assert sizes_of(args(expert=2), folders) == Sizes(1, 1, 2)
    assert sizes_of({}, folders) == Sizes(1, 2, 1)
    assert sizes_of({}, ["mp_rank_01_001_002"]) == Sizes(2, 2, 3)


def test_missing_and_extra_folders_are_all_named():
    problems = folder_problems(["mp_rank_00_000", "mp_rank_05_000"], Sizes(2, 2))
    assert len(problems) == 4
    assert "mp_rank_05_000 belongs to no rank" in problems[3]
    for name in ("mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"):
        assert any(problem.startswith(f"{name}/") for problem in problems), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor": 0}, "tensor_model_parallel_size must be an integer from 1"),
        ({"pipeline": "2"}, "pipeline_model_parallel_size must be an integer from 1"),
        ({"expert": True}, "expert_model_parallel_size must be an integer from 1"),
        ({"tensor": None}, "tensor_model_parallel_size"),
        ({"pipeline": None}, "pipeline_model_parallel_size"),
        ({"expert": None}, "expert_model_parallel_size"),
        ({"tensor": 1000, "pipeline": 1000, "expert": 1000}, "are more than"),
        ({"virtual_pipeline_model_parallel_size": 2}, "virtual_pipeline_model_parallel_size"),
        (
            {"tensor": 4, "expert_tensor_parallel_size": 1, "num_experts": 8},
            "expert_tensor_parallel_size must be tensor_model_parallel_size, 4, got 1",
        ),
    ],
)
def test_sizes_that_are_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        sizes_of(args(**changes), ["mp_rank_00"])


def test_without_experts_their_tensor_parallelism_does_not_matter():
    found = sizes_of(args(tensor=4, expert_tensor_parallel_size=1, num_experts=None), [])
    assert found == Sizes(4, 1, 1)


def test_layers_and_experts_are_numbered_from_0_on_the_rank():
    expert = "mlp.experts.local_experts.{}.linear_fc1.weight"
    for on_rank, in_model in (
        ("decoder.layers.0.", "decoder.layers.10."),
        ("mtp.layers.0.transformer_layer.",) * 2,
    ):
        found = _whole_name(on_rank + expert.format(3), 10, 20)
        assert found == in_model + expert.format(23)
    assert _whole_name("output_layer.weight", 10, 20) == "output_layer.weight"


def test_a_layer_number_that_no_model_has():
    """Counting to it would take forever."""
    assert _count(_DECODER_LAYER, ["decoder.layers.12.a", "decoder.layers.99999999999999.a"]) == 13
