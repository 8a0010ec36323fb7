"""Synthetic checkpoints: their tensors are written down apart from the converter's mapping table.

If these fail, one of the two is wrong, or serving was measured on something that is no checkpoint.
"""

import dataclasses
import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from benchmarks import synthetic
from benchmarks.synthetic import CONFIG, Choice, model_config, stored_tensors, total_bytes
from checkpoint_conversion.mapping import hugging_face_shapes
from checkpoint_conversion.model import ModelConfig

MB = 10**6
SMALL = Choice(layers=2, experts=4, scale_down=16, vocab_size=64)


def written(folder: Path, choice: Choice, **more: int) -> dict[str, torch.Tensor]:
    synthetic.write(folder, choice, **more)
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


@pytest.mark.parametrize("dense_layers", [0, 1])
def test_names_and_shapes(tmp_path, dense_layers):
    """And no two tensors or rows are equal; several processes write the same."""
    choice = dataclasses.replace(SMALL, dense_layers=dense_layers)
    tensors = written(tmp_path / "a", choice)
    config = ModelConfig.from_hugging_face(json.loads((tmp_path / "a/config.json").read_text()))
    assert {name: tuple(t.shape) for name, t in tensors.items()} == hugging_face_shapes(config)
    by_shape = defaultdict(list)
    for name, tensor in tensors.items():
        bias = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if bias else torch.bfloat16), name
        assert tensor.isfinite().all()
        by_shape[tuple(tensor.shape)].append(tuple(tensor.flatten()[:32].tolist()))
    assert all(len(set(same)) == len(same) for same in by_shape.values())
    rows = tensors["model.embed_tokens.weight"]
    assert len(rows.unique(dim=0)) == len(rows)
    again = written(tmp_path / "b", choice, shard_bytes=MB // 2, processes=2)
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors.items())
    shards = [path.stat().st_size for path in (tmp_path / "b").glob("*.safetensors")]
    largest = max(t.nbytes for t in tensors.values())
    assert len(shards) > 3 and max(shards) < max(largest, MB // 2) + 20_000


def test_the_whole_model():
    """DeepSeek-V3 has 671 billion parameters, and 3 dense layers; all but few have 2 bytes."""
    whole = {"layers": CONFIG["num_hidden_layers"], "experts": CONFIG["n_routed_experts"]}
    choice = Choice(**whole, dense_layers=3)
    assert total_bytes(choice) / 2 == pytest.approx(671.03e9, rel=1e-4)
    config = model_config(choice)
    shapes = {tensor.name: tensor.shape for tensor in stored_tensors(config)}
    assert shapes == hugging_face_shapes(ModelConfig.from_hugging_face(config))
