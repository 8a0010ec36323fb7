"""make_synthetic_checkpoint.py: real names and shapes, as the conversion expects them.

Its list of tensors is written down apart from the mapping table. If these fail, one of the two is
wrong, or memory and throughput were measured on something that is no checkpoint.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from benchmarks.make_synthetic_checkpoint import main
from benchmarks.synthetic_checkpoint import values
from benchmarks.synthetic_checkpoint.models import MODELS, Choice, model_config, stored_tensors
from benchmarks.synthetic_checkpoint.sizes import fit_size, parse_size, total_bytes
from checkpoint_conversion.mapping import hugging_face_shapes
from checkpoint_conversion.model import ModelConfig

SMALL = ("--scale-down", "16", "--vocab-size", "64", "--layers", "2", "--experts", "4")
V3, LITE = MODELS


def written(folder: Path, *options: str) -> dict[str, torch.Tensor]:
    assert main([str(folder), *SMALL, *options]) == 0
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert files == {path.name for path in folder.glob("*.safetensors")}
    tensors = {}
    for file in files:
        with safe_open(folder / file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - it is no dict
                assert index["weight_map"][name] == file
                tensors[name] = shard.get_tensor(name)
    assert set(tensors) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    return tensors


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("options", [(), ("--mtp",), ("--dense-layers", "0")])
@pytest.mark.parametrize("model", MODELS)
def test_names_and_shapes(tmp_path, model, options):
    tensors = written(tmp_path / "a", "--model", model, *options)
    config = ModelConfig.from_hugging_face(read_config(tmp_path / "a"))
    assert {name: tuple(t.shape) for name, t in tensors.items()} == hugging_face_shapes(config)
    for name, tensor in tensors.items():
        bias = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if bias else torch.bfloat16), name
        assert tensor.isfinite().all()
    assert any("e_score" in name for name in tensors) == (model == V3)


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_the_whole_model(model, mtp):
    """Nothing is written; the names and shapes of every layer and expert of the released model."""
    real = MODELS[model]
    counts = {"layers": real["num_hidden_layers"], "experts": real["n_routed_experts"]}
    config = model_config(Choice(model=model, mtp=mtp, **counts))
    shapes = {tensor.name: tensor.shape for tensor in stored_tensors(config)}
    assert shapes == hugging_face_shapes(ModelConfig.from_hugging_face(config))


def test_the_released_size():
    """DeepSeek-V3 has 671 billion parameters, and 3 dense layers; all but few have 2 bytes."""
    config = model_config(Choice(model=V3, layers=61, experts=256, dense_layers=3))
    assert total_bytes(config) / 2 == pytest.approx(671.03e9, rel=1e-4)
    config = model_config(Choice(model=LITE, layers=27, experts=64))
    assert total_bytes(config) / 2 == pytest.approx(15.706e9, rel=1e-4)


def test_no_two_tensors_are_equal(tmp_path):
    tensors = written(tmp_path / "a", "--mtp")
    by_shape = defaultdict(list)
    copies = 0
    for name, tensor in tensors.items():
        if name.endswith(("layers.2.embed_tokens.weight", "layers.2.shared_head.head.weight")):
            copies += 1
            original = "model.embed_tokens" if "embed" in name else "lm_head"
            assert torch.equal(tensor, tensors[f"{original}.weight"])
        else:
            by_shape[tuple(tensor.shape)].append(tensor.flatten())
    assert copies == 2
    for same in by_shape.values():
        assert len({tuple(t[:32].tolist()) for t in same}) == len(same)
    rows = tensors["model.embed_tokens.weight"]
    assert len(rows.unique(dim=0)) == len(rows)


def test_shards(tmp_path):
    tensors = written(tmp_path / "a", "--shard-size", "0.5MB")
    shards = list((tmp_path / "a").glob("*.safetensors"))
    assert len(shards) > 3
    largest = max(t.nbytes for t in tensors.values())
    assert max(path.stat().st_size for path in shards) < max(largest, 500_000) + 20_000


def test_fp8(tmp_path):
    """Scaled widths leave a partial block: kv_a has 512 / 16 + 64 = 96 rows."""
    tensors = written(tmp_path / "a", "--fp8", "--mtp")
    assert read_config(tmp_path / "a")["quantization_config"]["weight_block_size"] == [128, 128]
    quantised = {n for n, t in tensors.items() if t.dtype == torch.float8_e4m3fn}
    scales = {n.removesuffix("_scale_inv") for n in tensors if n.endswith("_scale_inv")}
    assert quantised == scales
    plain = ("norm.weight", "gate.weight", "embed_tokens.weight", "head.weight", "eh_proj.weight")
    matrices = {n for n, t in tensors.items() if n.endswith(".weight") and t.dim() == 2}
    assert quantised == {n for n in matrices if not n.endswith(plain)}
    partial = 0
    for name in quantised:
        weight, scale = tensors[name], tensors[f"{name}_scale_inv"]
        assert scale.dtype == torch.float32
        assert scale.shape == tuple(-(-width // 128) for width in weight.shape)
        assert (scale > 0).all()
        assert weight.float().isfinite().all()
        partial += any(width % 128 for width in weight.shape)
    assert partial


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("size", ["0.2GB", "6GB", "20GB"])
@pytest.mark.parametrize("mtp", [False, True])
def test_fit_size(model, size, mtp):
    target = parse_size(size)
    choice = fit_size(Choice(model=model, layers=1, experts=1, mtp=mtp), target)
    assert total_bytes(model_config(choice)) == pytest.approx(target, rel=0.16)
    assert choice.layers > choice.dense_layers == 1
    # Real widths wherever a model of real widths is small enough.
    assert choice.scale_down == 1 or target < 15e9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layers", "0"), "--layers must be at least 1, got 0"),
        (("--experts", "1"), "--experts must be at least 2, got 1"),
        (("--dense-layers", "3"), "--dense-layers must be at most --layers 2, got 3"),
        (("--mtp", "--dense-layers", "2"), "--mtp needs a MoE layer"),
        (("--scale-down", "3"), "--scale-down 3 does not divide vocab_size 129280"),
        (("--vocab-size", "0"), "--vocab-size must be at least 1, got 0"),
        (("--size", "much"), "got 'much'"),
        (("--size", "1GB", "--layers", "3"), "--size chooses layers and experts: drop --layers"),
        (("--layers", "61", "--experts", "256"), "GB are free there"),
    ],
)
def test_errors(tmp_path, capsys, options, message):
    assert main([str(tmp_path / "a"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "a").exists()


def test_existing_folder_is_refused(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine").write_text("kept")
    assert main([str(tmp_path / "a"), *SMALL]) == 2
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["mine"]


def test_nothing_stays_after_a_failure(tmp_path, monkeypatch, capsys):
    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(values, "save_file", fail)
    assert main([str(tmp_path / "a"), *SMALL]) == 1
    assert "error: disk full" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
