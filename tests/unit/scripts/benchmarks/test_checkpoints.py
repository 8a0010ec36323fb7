"""Synthetic checkpoints, and conversion.py: it measures what it says, and notices a missed bound.

The list of tensors is written down apart from the mapping table. If these fail, one of the two is
wrong, or memory and throughput were measured on something that is no checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from benchmarks import conversion, synthetic
from benchmarks.conversion import ConversionBenchmark, ConversionReport, Row
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


def test_fp8(tmp_path):
    """Scaled widths leave a partial block: kv_a has 512 / 16 + 64 = 96 rows."""
    tensors = written(tmp_path / "a", dataclasses.replace(SMALL, fp8=True))
    quantised = {n for n, t in tensors.items() if t.dtype == torch.float8_e4m3fn}
    scales = {n.removesuffix("_scale_inv") for n in tensors if n.endswith("_scale_inv")}
    plain = ("norm.weight", "gate.weight", "embed_tokens.weight", "head.weight")
    matrices = {n for n, t in tensors.items() if n.endswith(".weight") and t.dim() == 2}
    assert quantised == scales == {n for n in matrices if not n.endswith(plain)}
    for name in quantised:
        weight, scale = tensors[name], tensors[f"{name}_scale_inv"]
        assert scale.dtype == torch.float32 and (scale > 0).all()
        assert scale.shape == tuple(-(-width // 128) for width in weight.shape)
        assert weight.float().isfinite().all()
    assert any(width % 128 for name in quantised for width in tensors[name].shape)


def test_the_whole_model():
    """DeepSeek-V3 has 671 billion parameters, and 3 dense layers; all but few have 2 bytes."""
    whole = {"layers": CONFIG["num_hidden_layers"], "experts": CONFIG["n_routed_experts"]}
    choice = Choice(**whole, dense_layers=3)
    assert total_bytes(choice) / 2 == pytest.approx(671.03e9, rel=1e-4)
    config = model_config(choice)
    shapes = {tensor.name: tensor.shape for tensor in stored_tensors(config)}
    assert shapes == hugging_face_shapes(ModelConfig.from_hugging_face(config))


@pytest.mark.parametrize("size", ["0.2GB", "6GB", "20GB"])
def test_fit_size(size):
    target = synthetic.parse_size(size)
    choice = synthetic.fit_size(target)
    assert total_bytes(choice) == pytest.approx(target, rel=0.16)
    # Real widths wherever a model of real widths is small enough.
    assert choice.layers > 1 and (choice.scale_down == 1 or target < 15e9)


ROW = Row(
    path="hf → megatron",
    model="a model",
    source_bytes=5000 * MB,
    target_bytes=5001 * MB,
    largest_tensor=200 * MB,
    keeps_dtypes=True,
    cp_seconds=(10.0, 14.0),
    tool_seconds=(19.0, 21.0),
    peak_bytes=1100 * MB,
    anonymous_bytes=300 * MB,
)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_bounds(tmp_path, capsys):
    """Missed ones are in the file, in the notes and the exit code."""
    assert ROW.ratio == 0.6 and ROW.memory_bound == 1100 * MB and not ROW.missed()
    slow = dataclasses.replace(ROW, tool_seconds=(20.0, 21.0))
    large = dataclasses.replace(ROW, source_bytes=20_000 * MB, peak_bytes=1200 * MB)
    assert "0.59 of cp's throughput" in slow.missed()[0]
    assert not dataclasses.replace(slow, keeps_dtypes=False).missed()
    assert not dataclasses.replace(slow, source_bytes=3900 * MB).missed()
    assert dataclasses.replace(large, keeps_dtypes=False).missed()
    found = ConversionReport(conversion.describe(tmp_path), [large, ROW])
    found.write(tmp_path / "a.json")
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["rows"][0]["missed"] and not content["rows"][1]["missed"]
    assert content["machine"]["cores"] > 0 and content["machine"]["versions"]["torch"] != "unknown"
    missed = "missed: hf → megatron at 20.00 GB: 1200 MB resident, at most 1100 MB"
    assert missed in "\n".join(ConversionReport.notes([found]))
    for rows, code in (([large, ROW], 1), ([ROW], 0)):
        assert ConversionBenchmark.exit_code(None, ConversionReport({}, rows)) == code
        assert (missed in capsys.readouterr().err) == bool(code)


# Long enough for a sample.
COPY = "import shutil, sys, time; shutil.copytree(*sys.argv[2:4]); time.sleep(0.5)"


@pytest.mark.parametrize("code", [COPY, "raise SystemExit('the reason')"], ids=["copies", "fails"])
def test_the_whole_measurement(code, tmp_path, monkeypatch, capfd):
    """With a tool that copies, at a size where only memory has a bound; and with one that fails."""
    monkeypatch.setattr(conversion, "TOOL", python(code))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    options = ["--sizes", "3MB", "--repeat", "1", "--work-folder", str(work)]
    assert ConversionBenchmark.main([str(out), *options]) == int(code != COPY)
    assert not list(work.iterdir())
    shown = capfd.readouterr()
    if code != COPY:
        assert "the reason" in shown.err
        return
    rows = json.loads((out / "benchmark.json").read_text())["rows"]
    sources = ["hf", "hf", "megatron", "hf (FP8)"]
    assert [row["path"].split(" → ")[0] for row in rows] == sources
    for row in rows:
        assert len(row["cp_seconds"]) == len(row["tool_seconds"]) == 1
        assert row["source_bytes"] == row["target_bytes"] > 2 * MB
        assert 5 * MB < row["peak_bytes"] < 100 * MB
    assert rows[-1]["source_bytes"] < rows[0]["source_bytes"]
    assert "hf (FP8) → megatron" in shown.out
