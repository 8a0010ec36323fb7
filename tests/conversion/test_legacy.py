"""Per-rank checkpoints are read: every model, layout and grid of ranks, bit by bit."""

from __future__ import annotations

import json

import pytest
import torch

from checkpoint_conversion.checkpoint_folder import kind_of
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.legacy import LegacyCheckpoint
from tests.conversion.legacy_support import (
    change_rank,
    load_rank,
    only_args_config,
    read_legacy,
    save_rank,
    write_legacy,
)
from tests.conversion.support import (
    CONFIGS,
    NO_FUSED_DOWN,
    assert_same_tensors,
    random_tensors,
    tiny_config,
)

LAYOUTS = {
    "plain": {},
    "tp": {"tensor_parallel": 2},
    "tp x pp": {"tensor_parallel": 2, "pipeline_parallel": 3, "iteration": 100},
    "local": {"norms": "separate", "cut_down": True, "tensor_parallel": 2, "experts": "grouped"},
    "split": {"kv_up": "split", "tensor_parallel": 4, "cut_down": True},
    "fused down": {"down": "fused", "tensor_parallel": 2, "pipeline_parallel": 3},
    "fused down, cut": {"down": "fused", "cut_down": True, "tensor_parallel": 4},
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout)
        for name in CONFIGS
        for layout in LAYOUTS
        if "fused down" not in layout or name not in NO_FUSED_DOWN
    ],
)
def test_every_model_and_layout_comes_back(tmp_path, name, layout):
    config = tiny_config(**CONFIGS[name])
    tensors = random_tensors(config)
    options = LAYOUTS[layout]
    write_legacy(tmp_path, config, tensors, **options)
    checkpoint = LegacyCheckpoint(tmp_path)
    assert_same_tensors(read_legacy(tmp_path), tensors)
    assert checkpoint.config == config
    expected = {"norms": "fused", "kv_up": "combined", "down": "separate"}
    expected |= {"experts": "sequential"} if config.num_experts else {}
    expected |= {"tensor_parallel": 1, "pipeline_parallel": 1}
    known = {*expected, "iteration"}
    expected |= {option: value for option, value in options.items() if option in known}
    assert checkpoint.layout == expected
    used = [tensor.leaves for tensor in checkpoint.hugging_face_tensors().values()]
    assert frozenset().union(*used) == set(checkpoint.stored)


def test_either_folder_can_be_given(tmp_path, config, tensors):
    write_legacy(tmp_path, config, tensors, tensor_parallel=2, pipeline_parallel=3, iteration=7)
    inner = tmp_path / "iter_0000007"
    for folder in (tmp_path, inner):
        assert kind_of(folder) == "legacy"
        assert LegacyCheckpoint(folder).layout["iteration"] == 7
        assert_same_tensors(read_legacy(folder), tensors)


def test_the_config_is_also_in_the_args(tmp_path, config, tensors):
    write_legacy(tmp_path, config, tensors, tensor_parallel=2)
    expected = LegacyCheckpoint(tmp_path).config
    assert expected == config
    only_args_config(tmp_path)
    assert LegacyCheckpoint(tmp_path).config == config
    for rank in ("mp_rank_00", "mp_rank_01"):
        change_rank(tmp_path / "release" / rank, lambda content: content.pop("args"))
    with pytest.raises(CheckpointError, match="--hf-config"):
        LegacyCheckpoint(tmp_path)
    hf_config = tmp_path / "config.json"
    hf_config.write_text(json.dumps(config.hugging_face))
    assert LegacyCheckpoint(tmp_path, hf_config=hf_config).config == config


def test_padding_of_the_vocabulary_is_dropped(tmp_path):
    """Megatron refuses a table whose rows do not divide, and pads it with zeros."""
    config = tiny_config(vocab_size=61)
    tensors = random_tensors(config)
    write_legacy(tmp_path, config, tensors, tensor_parallel=2, vocab_multiple=3)
    model = load_rank(tmp_path / "release/mp_rank_01")["model"]
    assert model["output_layer.weight"].shape[0] == 33
    checkpoint = LegacyCheckpoint(tmp_path)
    assert checkpoint.notes == ["5 rows of padding after the vocabulary are dropped"]
    assert_same_tensors(read_legacy(tmp_path), tensors)


class TestCopies:
    """What several ranks hold must be the same everywhere."""

    @pytest.fixture
    def folder(self, tmp_path, config, tensors):
        write_legacy(tmp_path, config, tensors, tensor_parallel=2)
        return tmp_path

    def read_with(self, folder, rank, name):
        """Read after one value of a tensor was changed by a little."""

        def change(content):
            content["model"][name].view(-1)[3] *= 1.01

        change_rank(folder / "release" / rank, change)
        return read_legacy(folder)

    @pytest.mark.parametrize(
        "name",
        [
            "decoder.final_layernorm.weight",
            "decoder.layers.0.self_attention.linear_kv_down_proj.weight",
            "decoder.layers.1.mlp.router.weight",
        ],
    )
    def test_of_tensor_parallel_ranks(self, folder, name):
        with pytest.raises(CheckpointError, match=r"mp_rank_0.*differs between tensor-parallel"):
            self.read_with(folder, "mp_rank_01", name)

    def test_what_is_no_copy_may_differ(self, folder, tensors):
        name = "decoder.layers.0.self_attention.linear_q_up_proj.weight"
        found = self.read_with(folder, "mp_rank_01", name)
        changed = {key for key in tensors if not torch.equal(found[key], tensors[key])}
        assert changed == {"model.layers.0.self_attn.q_b_proj.weight"}

    @pytest.mark.parametrize(
        ("changes", "name"),
        [
            ({"tie_word_embeddings": True}, "output_layer.weight"),
            ({"num_nextn_predict_layers": 1}, "embedding.word_embeddings.weight"),
        ],
    )
    def test_of_the_embedding_on_the_last_stage(self, tmp_path, changes, name):
        config = tiny_config(**changes)
        write_legacy(tmp_path, config, random_tensors(config), pipeline_parallel=3)
        assert name in load_rank(tmp_path / "release/mp_rank_00_002")["model"]
        with pytest.raises(CheckpointError, match="copies of one weight, but differ"):
            self.read_with(tmp_path, "mp_rank_00_002", name)

    def test_need_not_be_on_the_last_stage(self, tmp_path):
        """They say nothing that the first stage does not say."""
        config = tiny_config(tie_word_embeddings=True)
        tensors = random_tensors(config)
        write_legacy(tmp_path, config, tensors, pipeline_parallel=3)
        last = tmp_path / "release/mp_rank_00_002"
        change_rank(last, lambda content: content["model"].pop("output_layer.weight"))
        assert_same_tensors(read_legacy(tmp_path), tensors)


@pytest.mark.parametrize(("mtp_layers", "early", "late"), [(0, 0, 1), (1, 1, 2)])
def test_stages_of_unequal_length(tmp_path, mtp_layers, early, late):
    """Megatron can give stages fewer layers, or MTP layers a stage of their own.

    The final norm then stays with the decoder's last layer.
    """
    config = tiny_config(num_nextn_predict_layers=mtp_layers)
    tensors = random_tensors(config)
    write_legacy(tmp_path, config, tensors, pipeline_parallel=3)
    folders = [tmp_path / f"release/mp_rank_00_00{i}" for i in (early, late)]
    first, second = map(load_rank, folders)
    for name in list(second["model"]):
        if name.startswith("decoder."):
            moved = name.replace("decoder.layers.0.", "decoder.layers.1.")
            first["model"][moved] = second["model"].pop(name)
    save_rank(folders[0], first)
    save_rank(folders[1], second)
    assert_same_tensors(read_legacy(tmp_path), tensors)


def test_older_names_of_mtp_layers(tmp_path):
    config = tiny_config(num_nextn_predict_layers=1)
    tensors = random_tensors(config)
    write_legacy(tmp_path, config, tensors)

    def rename(content):
        content["model"] = {
            name.replace("mtp_model_layer", "transformer_layer"): value
            for name, value in content["model"].items()
        }

    change_rank(tmp_path / "release/mp_rank_00", rename)
    assert_same_tensors(read_legacy(tmp_path), tensors)


def test_what_is_no_weight_is_left_alone(tmp_path, config, tensors):
    """Optimizer, random and FP8 states are named, with their bytes."""
    write_legacy(tmp_path, config, tensors)
    inner = tmp_path / "release/mp_rank_00"
    module = "decoder.layers.0.self_attention.linear_proj._extra_state"

    def add(content):
        moment = torch.zeros(10, 10)
        content["optimizer"] = {"state": [moment, {"same": moment}, (torch.zeros(3),)], "step": 3}
        content["rng_state"] = [{"torch_rng_state": torch.zeros(8, dtype=torch.uint8)}]
        content["opt_param_scheduler"] = {"lr": 0.1}
        content["optimizer"]["itself"] = content["optimizer"]
        content["model"][module] = torch.zeros(100, dtype=torch.uint8)
        content["model"]["output_layer._extra_state"] = torch.zeros(0, dtype=torch.uint8)

    change_rank(inner, add)
    (inner / "distrib_optim.pt").write_bytes(bytes(50))
    checkpoint = LegacyCheckpoint(tmp_path)
    assert checkpoint.left_alone == {
        "mp_rank_00/optimizer": 412,
        "mp_rank_00/rng_state": 8,
        "mp_rank_00/opt_param_scheduler": 0,
        f"mp_rank_00/{module}": 100,
        "mp_rank_00/distrib_optim.pt": 50,
    }
    assert any("FP8 states" in note and module in note for note in checkpoint.notes)
    assert_same_tensors(read_legacy(tmp_path), tensors)
