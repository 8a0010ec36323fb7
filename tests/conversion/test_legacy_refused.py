"""Files of ranks that do not fit: one error that names everything, before anything is read.

First the arithmetic of ranks and names, without files.
"""

import json
import shutil

import pytest
import torch

from checkpoint_conversion.checkpoint_folder import RANK_FILE, RANK_FOLDER
from checkpoint_conversion.formats.legacy import (
    _DECODER_LAYER,
    LegacyCheckpoint,
    _count,
    whole_name,
)
from checkpoint_conversion.formats.legacy_ranks import Rank, Sizes, folder_problems, sizes_of
from tests.conversion.legacy_support import change_rank, save_rank, write_legacy
from tests.conversion.support import refused


class TestRanks:
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
    def test_folders_have_megatrons_names(self, sizes, rank, folder):
        assert sizes.folder(rank) == folder
        assert RANK_FOLDER.fullmatch(folder)

    def test_other_folders_are_no_ranks(self):
        for name in ("mp_rank_0", "mp_rank_00_1", "mp_rank_00_000_000_000", "rank_00"):
            assert not RANK_FOLDER.fullmatch(name)

    @staticmethod
    def args(tensor=1, pipeline=1, expert=1, **others) -> dict:
        names = {"tensor": tensor, "pipeline": pipeline, "expert": expert}
        return {f"{name}_model_parallel_size": size for name, size in names.items()} | others

    def test_the_second_number_is_what_the_args_say(self):
        """The same folders can be two pipeline stages or two expert-parallel ranks."""
        folders = ["mp_rank_00_000", "mp_rank_00_001"]
        assert sizes_of(self.args(pipeline=2), folders) == Sizes(1, 2, 1)
        assert sizes_of(self.args(expert=2), folders) == Sizes(1, 1, 2)
        assert sizes_of({}, folders) == Sizes(1, 2, 1)
        assert sizes_of({}, ["mp_rank_01_001_002"]) == Sizes(2, 2, 3)

    def test_missing_and_extra_folders_are_all_named(self):
        problems = folder_problems(["mp_rank_00_000", "mp_rank_05_000"], Sizes(2, 2))
        missing = [f"{name}/{RANK_FILE} is missing" for name in self.MISSING]
        assert problems[:3] == missing and "mp_rank_05_000 belongs to no rank" in problems[3]

    MISSING = ("mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001")

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
    def test_sizes_that_are_refused(self, changes, message):
        with refused(message):
            sizes_of(self.args(**changes), ["mp_rank_00"])

    def test_without_experts_their_tensor_parallelism_does_not_matter(self):
        args = self.args(tensor=4, expert_tensor_parallel_size=1, num_experts=None)
        assert sizes_of(args, []) == Sizes(4, 1, 1)

    def test_layers_and_experts_are_numbered_from_0_on_the_rank(self):
        expert = "mlp.experts.local_experts.{}.linear_fc1.weight"
        for on_rank, in_model in (
            ("decoder.layers.0.", "decoder.layers.10."),
            ("mtp.layers.0.transformer_layer.",) * 2,
        ):
            found = whole_name(on_rank + expert.format(3), 10, 20)
            assert found == in_model + expert.format(23)
        assert whole_name("output_layer.weight", 10, 20) == "output_layer.weight"

    def test_a_layer_number_that_no_model_has(self):
        """Counting to it would take forever."""
        names = ["decoder.layers.12.a", "decoder.layers.99999999999999.a"]
        assert _count(_DECODER_LAYER, names) == 13


@pytest.fixture
def folder(tmp_path, config, tensors):
    write_legacy(tmp_path, config, tensors, tensor_parallel=2, pipeline_parallel=3)
    return tmp_path


def test_missing_and_extra_ranks(folder):
    inner = folder / "release"
    shutil.rmtree(inner / "mp_rank_00_001")
    (inner / "mp_rank_01_002" / RANK_FILE).unlink()
    shutil.copytree(inner / "mp_rank_00_000", inner / "mp_rank_07_000")
    with refused("mp_rank_00_001", "mp_rank_01_002", "mp_rank_07_000", problems=3):
        LegacyCheckpoint(folder)


LAYER = "decoder.layers.0."
NORM, ROUTER = f"{LAYER}input_layernorm.weight", f"{LAYER}mlp.router.weight"
PROJ, BOTH = f"{LAYER}self_attention.linear_proj.weight", "mp_rank_00_001, mp_rank_01_001"


def renamed_norm(content):
    content["model"][f"{LAYER}input_layernrom.weight"] = content["model"].pop(NORM)


def several(content):
    """Unknown, missing and misshapen tensors."""
    renamed_norm(content)
    model = content["model"]
    model[ROUTER] = model[ROUTER][:, 1:].clone()
    model[PROJ] = model[PROJ].to(torch.int8)
    model[f"{LAYER}note"] = "text"


def proj_in_float32(content):
    content["model"][PROJ] = content["model"][PROJ].float()


def without_layers(content):
    content["model"] = {k: v for k, v in content["model"].items() if "layers" not in k}


# What is done to the files of some ranks, these, the number of problems, and parts of them.
DAMAGES = {
    "several": (
        several,
        ["01_001"],
        5,
        "mp_rank_01_001: decoder.layers.0.note is no tensor but a str",
        f"{NORM} is missing in mp_rank_01_001",
        "input_layernrom.weight is missing in mp_rank_00_001",
        f"{ROUTER} of {BOTH} is torch.bfloat16 (4, 31) and torch.bfloat16 (4, 32)",
        f"{PROJ} of {BOTH} is torch.bfloat16 (32, 40) and torch.int8 (32, 40)",
    ),
    # One line for the model, with the nearest name.
    "all ranks lack it": (
        renamed_norm,
        ["00_001", "01_001"],
        2,
        "\n  decoder.layers.1.input_layernorm.weight is missing",
        "the nearest known name is decoder.layers.1.input_layernorm.weight",
    ),
    "other dtypes": (
        proj_in_float32,
        ["01_001"],
        1,
        f"{PROJ} of {BOTH} is torch.bfloat16 (32, 40) and torch.float32 (32, 40) on different rank",
    ),
    "number of layers": (
        without_layers,
        ["00_001", "01_001"],
        1,
        "hold 1, 0, 1 layers, together 2; the model has 3",
    ),
    "iterations": (
        lambda content: content.update(iteration=3),
        ["01_001"],
        6,
        "mp_rank_01_001 is of iteration 3",
    ),
    "model in chunks": (
        lambda content: content.update(model0=content.pop("model")),
        ["00_000"],
        0,
        "virtual_pipeline_model_parallel_size above 1",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_ranks_that_do_not_fit(folder, damage):
    change, ranks, problems, *parts = DAMAGES[damage]
    for rank in ranks:
        change_rank(folder / f"release/mp_rank_{rank}", change)
    with refused(*parts, problems=problems):
        LegacyCheckpoint(folder).hugging_face_tensors()


def test_another_model(folder, config):
    other = {**config.hugging_face, "num_attention_heads": 8, "num_key_value_heads": 8}
    path = folder / "other.json"
    path.write_text(json.dumps(other))
    # q_b, kv_b and o of every layer.
    with refused(" has shape ", problems=3 * 3):
        LegacyCheckpoint(folder, hf_config=path).hugging_face_tensors()


@pytest.mark.parametrize("content", [[1], {"args": None}, {"model": []}, {}])
def test_files_without_a_model(folder, content):
    save_rank(folder / "release/mp_rank_00_000", content)
    with refused("mp_rank_00_000"):
        LegacyCheckpoint(folder)
