"""Arithmetic of ranks and names, without files."""

from __future__ import annotations

import pytest

from checkpoint_conversion.checkpoint_folder import is_rank_folder
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.legacy_ranks import (
    Rank,
    Sizes,
    folder_problems,
    sizes_of,
    stages_of,
)
from checkpoint_conversion.formats.legacy_sharding import (
    as_mapped,
    layer_count,
    mtp_layer_count,
    name_on_rank,
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


def test_every_rank_has_a_folder_of_its_own():
    sizes = Sizes(2, 3, 4)
    folders = {sizes.folder(rank) for rank in sizes.ranks()}
    assert len(folders) == 24
    assert not folder_problems(folders, sizes)


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
        ({"tensor": 0}, "tensor_model_parallel_size must be a positive"),
        ({"pipeline": "2"}, "pipeline_model_parallel_size must be a positive"),
        ({"expert": True}, "expert_model_parallel_size must be a positive"),
        ({"tensor": 1000, "pipeline": 1000, "expert": 1000}, "are more than"),
        ({"virtual_pipeline_model_parallel_size": 2}, "virtual_pipeline_model_parallel_size"),
        (
            {"tensor": 4, "expert_tensor_parallel_size": 1, "num_experts": 8},
            "expert_tensor_parallel_size=1 is not supported",
        ),
    ],
)
def test_sizes_that_are_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        sizes_of(args(**changes), ["mp_rank_00"])


def test_without_experts_their_tensor_parallelism_does_not_matter():
    found = sizes_of(args(tensor=4, expert_tensor_parallel_size=1, num_experts=None), [])
    assert found == Sizes(4, 1, 1)


def test_layers_of_stages():
    assert stages_of([3, 0, 2]) == [range(3), range(3, 3), range(3, 5)]


@pytest.mark.parametrize(
    ("on_rank", "in_model"),
    [
        ("decoder.layers.1.input_layernorm.weight", "decoder.layers.11.input_layernorm.weight"),
        (
            "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight",
            "decoder.layers.10.mlp.experts.local_experts.23.linear_fc1.weight",
        ),
        (
            "mtp.layers.0.transformer_layer.mlp.experts.local_experts.0.linear_fc2.weight",
            "mtp.layers.0.transformer_layer.mlp.experts.local_experts.20.linear_fc2.weight",
        ),
        ("mtp.layers.0.enorm.weight", "mtp.layers.0.enorm.weight"),
        ("output_layer.weight", "output_layer.weight"),
    ],
)
def test_layers_and_experts_are_numbered_from_0_on_the_rank(on_rank, in_model):
    assert name_on_rank(in_model, 10, 20) == on_rank


@pytest.mark.parametrize(
    ("stored", "mapped"),
    [
        (
            "decoder.layers.0.mlp.experts.linear_fc1.weight12",
            "decoder.layers.0.mlp.experts.local_experts.12.linear_fc1.weight",
        ),
        (
            "mtp.layers.0.mtp_model_layer.mlp.experts.local_experts.1.linear_fc2.weight",
            "mtp.layers.0.transformer_layer.mlp.experts.local_experts.1.linear_fc2.weight",
        ),
        (
            "mtp.layers.1.mtp_model_layer.mlp.experts.linear_fc2.weight3",
            "mtp.layers.1.transformer_layer.mlp.experts.local_experts.3.linear_fc2.weight",
        ),
        ("mtp.layers.1.eh_proj.weight", "mtp.layers.1.eh_proj.weight"),
        # The name of older releases.
        *[("mtp.layers.0.transformer_layer.input_layernorm.weight",) * 2],
    ],
)
def test_names_of_modules(stored, mapped):
    assert as_mapped(stored) == mapped


def test_layers_are_counted():
    names = ["decoder.layers.0.a", "decoder.layers.12.b", "mtp.layers.0.c", "decoder.norm"]
    assert (layer_count(names), mtp_layer_count(names)) == (13, 1)
    assert (layer_count([]), mtp_layer_count([])) == (0, 0)
    # Nobody has so many, and counting to it would take forever.
    assert layer_count(["decoder.layers.99999999999999.a"]) == 0
