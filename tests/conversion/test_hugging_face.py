"""Reading Hugging Face checkpoints: every tensor, bit by bit, and no more of a file than needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoint_conversion.checkpoint_folder import kind_of
from checkpoint_conversion.formats.hugging_face import HuggingFaceCheckpoint
from checkpoint_conversion.fp8 import FP8, quantise, scale_shape
from checkpoint_conversion.lazy_tensor import ReadSession
from tests.conversion.support import (
    CONFIGS,
    INDEX,
    SINGLE,
    assert_same_tensors,
    change_json,
    described,
    hugging_face_config,
    load_all,
    random_tensors,
    refused,
    safetensors_bytes,
    tiny_config,
    write_hugging_face,
)


def opened(
    folder: Path, tensors: dict | None = None, shards: int = 2, **changes
) -> HuggingFaceCheckpoint:
    """A checkpoint with these tensors, or those of the model."""
    config = tiny_config(**changes)
    write_hugging_face(folder, config, tensors or random_tensors(config), shards)
    return HuggingFaceCheckpoint(folder)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor(tmp_path, name, shards):
    tensors = random_tensors(tiny_config(**CONFIGS[name]))
    checkpoint = opened(tmp_path / "a", tensors, shards, **CONFIGS[name])
    assert_same_tensors(load_all(checkpoint.hugging_face_tensors()), tensors)
    assert set(checkpoint.stored) == set(tensors)
    assert checkpoint.config == tiny_config(**CONFIGS[name])
    assert checkpoint.layout["files"] == shards
    assert checkpoint.layout["quantisation"] == "none"
    assert checkpoint.notes == []
    for name, tensor in checkpoint.hugging_face_tensors().items():
        assert tensor.leaves == {name}
        assert tensor.peak == tensor.nbytes == tensors[name].nbytes


def test_single_file(tmp_path, tensors):
    opened(tmp_path / "a", tensors, 1)
    (tmp_path / "a" / INDEX).unlink()
    (tmp_path / "a" / "model-00001-of-00001.safetensors").rename(tmp_path / "a" / SINGLE)
    checkpoint = HuggingFaceCheckpoint(tmp_path / "a")
    assert_same_tensors(load_all(checkpoint.hugging_face_tensors()), tensors)
    assert checkpoint.layout["files"] == 1


def test_recognises(tmp_path):
    write_hugging_face(tmp_path / "a", tiny_config(), {"x": torch.ones(1)}, 1)
    assert kind_of(tmp_path / "a") == "hugging_face"
    (tmp_path / "a" / INDEX).unlink()
    assert kind_of(tmp_path / "a") == "hugging_face"
    (tmp_path / "a" / "model-00001-of-00001.safetensors").unlink()
    assert kind_of(tmp_path / "a") is None
    assert kind_of(tmp_path / "missing") is None


class TestParts:
    def test_parts_of_parts(self, tmp_path, tensors):
        name = "model.layers.0.self_attn.kv_b_proj.weight"
        whole = opened(tmp_path / "a", tensors).hugging_face_tensors()[name]
        part = whole.narrow(0, 8, 100).narrow(1, 5, 11).narrow(0, 3, 50)
        assert torch.equal(load_all({"x": part})["x"], tensors[name][11:61, 5:16])
        assert (part.shape, part.leaves) == ((50, 11), {name})
        rows = whole.narrow(0, 8, 100)
        assert rows.peak == rows.nbytes

    def test_only_what_is_needed_is_read(self, tmp_path):
        """Otherwise cutting a stacked tensor into layers would need all of it every time."""
        path = sparse_checkpoint(tmp_path / "a", rows=50_000, columns=2000)
        whole = HuggingFaceCheckpoint(tmp_path / "a").stored["model.embed_tokens.weight"]
        assert whole.nbytes == 200_000_000
        part = whole.narrow(0, 20_000, 2500)
        with ReadSession() as session:
            assert resident(path) == 0
            assert (part.load(session) == 0).all()
            assert part.nbytes == part.peak == 10_000_000
            # The kernel maps pages around those that are read.
            assert part.peak - 4096 <= resident(path) <= part.peak + (256 << 10)
            columns = whole.narrow(1, 0, 10)
            assert (columns.load(session) == 0).all()
            assert resident(path) > 100_000_000
            assert resident(path) <= columns.peak + (256 << 10) <= 2 * whole.nbytes
        assert resident(path) == 0


def sparse_checkpoint(folder: Path, rows: int, columns: int) -> Path:
    """A file whose values are a hole, so that making it takes no time."""
    folder.mkdir()
    size = 2 * rows * columns
    entry = described("BF16", [rows, columns], 0, size)
    header = safetensors_bytes({"model.embed_tokens.weight": entry}, b"")
    with (folder / SINGLE).open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    (folder / "config.json").write_text(json.dumps(hugging_face_config()))
    return folder / SINGLE


def resident(path: Path) -> int:
    """Bytes of a file that this process has mapped and in memory."""
    total, counting = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            counting = line.endswith(str(path))
        elif counting and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


class TestFp8:
    def pairs(self, scale_dtype: torch.dtype) -> tuple[dict, dict]:
        """A checkpoint with some weights in FP8, and the same with them dequantised."""
        stored = random_tensors(tiny_config(kv_lora_rank=150, hidden_size=300))
        plain = dict(stored)
        for name in list(stored):
            if name.endswith("_proj.weight") or "with_mqa" in name:
                weight, scale, _ = quantise(stored[name], "ue8m0", name)
                stored[name], stored[f"{name}_scale_inv"] = weight, scale.to(scale_dtype)
                blocks = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
                rows, columns = weight.shape
                plain[name] = (weight.float() * blocks[:rows, :columns]).bfloat16()
        return stored, plain

    @pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
    def test_dequantised(self, tmp_path, scale_dtype):
        stored, plain = self.pairs(scale_dtype)
        config = {"kv_lora_rank": 150, "hidden_size": 300}
        checkpoint = opened(tmp_path / "a", stored, **config)
        tensors = checkpoint.hugging_face_tensors()
        assert_same_tensors(load_all(tensors), plain)
        assert set(checkpoint.stored) == set(stored)
        assert set().union(*(t.leaves for t in tensors.values())) == set(stored)
        assert "FP8 in blocks of 128 x 128" in str(checkpoint.layout["quantisation"])
        (note,) = checkpoint.notes
        assert note == "the files hold FP8 weights, and config.json says otherwise"
        wide = load_all(checkpoint.hugging_face_tensors(torch.float32))
        name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
        assert wide[name].dtype == torch.float32
        assert torch.equal(wide[name].bfloat16(), plain[name])
        # Only what was FP8 changes.
        assert wide["model.norm.weight"].dtype == torch.bfloat16

    def test_problems(self, tmp_path):
        stored, _ = self.pairs(torch.float32)
        layer = "model.layers.0.self_attn."
        del stored[f"{layer}o_proj.weight_scale_inv"]
        stored[f"{layer}q_a_proj.weight_scale_inv"] = torch.ones(7, 7)
        stored[f"{layer}kv_b_proj.weight"] = stored[f"{layer}kv_b_proj.weight"].float()
        del stored["model.layers.1.self_attn.o_proj.weight"]
        stored["lm_head.weight"] = torch.ones(1).to(FP8)
        checkpoint = opened(tmp_path / "a", stored, kv_lora_rank=150, hidden_size=300)
        with refused(
            "7 problems",
            "o_proj.weight is FP8, but model.layers.0.self_attn.o_proj.weight_scale_inv is missing",
            f"weight_scale_inv has shape (7, 7); expected {scale_shape((16, 300))}",
            "kv_b_proj.weight_scale_inv is the scale of a weight that is torch.float32, not FP8",
            "model.layers.1.self_attn.o_proj.weight_scale_inv is the scale of a weight that is mis",
            "lm_head.weight is FP8 of shape (1,)",
            "lm_head.weight has shape (1,); expected (64, 300)",
            "\n  model.layers.1.self_attn.o_proj.weight is missing",
            problems=7,
        ):
            checkpoint.hugging_face_tensors()


class TestModelAndFiles:
    @pytest.mark.parametrize(("announced", "held"), [(1, 0), (0, 1), (1, 1), (2, 1)])
    def test_mtp_layers_are_those_of_the_files(self, tmp_path, announced, held):
        tensors = random_tensors(tiny_config(num_nextn_predict_layers=held))
        checkpoint = opened(tmp_path / "a", tensors, num_nextn_predict_layers=announced)
        assert checkpoint.config.mtp_layers == held
        assert_same_tensors(load_all(checkpoint.hugging_face_tensors()), tensors)
        said = f"config.json announces {announced} MTP layers, the files hold {held}"
        assert checkpoint.notes == ([said] if announced != held else [])

    def test_one_layer_too_many_is_no_mtp_layer(self, tmp_path, tensors):
        checkpoint = opened(tmp_path / "a", tensors, num_hidden_layers=2)
        assert checkpoint.config.mtp_layers == 0
        with refused("layers.2.mlp.gate.weight of shape (4, 32) is unknown"):
            checkpoint.hugging_face_tensors()

    def test_rotary_buffers_are_left_alone(self, tmp_path, tensors):
        names = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
        buffers = {name: torch.ones(4) for name in names}
        checkpoint = opened(tmp_path / "a", tensors | buffers)
        assert checkpoint.left_alone == dict.fromkeys(buffers, 16)
        assert_same_tensors(load_all(checkpoint.hugging_face_tensors()), tensors)

    def test_files_beside_the_weights(self, tmp_path):
        opened(tmp_path / "a")
        travelling = ["generation_config.json", "tokenizer.json", "tokenizer.model", "LICENSE"]
        travelling += ["modeling_deepseek.py", "chat_template.jinja", "README.md", "merges.txt"]
        others = ["pytorch_model.bin", "pytorch_model.bin.index.json", "old.pt"]
        for name in [*travelling, *others, "conversion_manifest.json"]:
            (tmp_path / "a" / name).write_text(name)
        (tmp_path / "a" / "figures").mkdir()
        checkpoint = HuggingFaceCheckpoint(tmp_path / "a")
        assert set(checkpoint.auxiliary) == {*travelling, "config.json"}
        assert checkpoint.auxiliary["LICENSE"].read_text() == "LICENSE"
        formats, folders = checkpoint.notes
        assert all(name in formats for name in others)
        assert "figures" in folders

    @pytest.mark.parametrize("change", ["dtype", "shape", "truncated", "gone"])
    def test_changed_after_it_was_opened(self, tmp_path, change):
        checkpoint = opened(tmp_path / "a", shards=1)
        (file,) = (tmp_path / "a").glob("*.safetensors")
        file.rename(tmp_path / "before")
        if change == "truncated":
            file.write_bytes((tmp_path / "before").read_bytes()[:-1])
        elif change != "gone":
            one = {"dtype": torch.float16, "shape": torch.bfloat16}[change]
            shape = (64, 32) if change == "dtype" else (32, 64)
            save_file({"lm_head.weight": torch.ones(shape, dtype=one)}, file)
        why = "was changed" if change in ("dtype", "shape") else "cannot be read"
        with refused(why), ReadSession() as session:
            checkpoint.stored["lm_head.weight"].load(session)

    def test_quantisation_that_is_announced_only(self, tmp_path):
        opened(tmp_path / "a")
        quantisation = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        change_json(tmp_path / "a" / "config.json", quantization_config=quantisation)
        (note,) = HuggingFaceCheckpoint(tmp_path / "a").notes
        assert note == "the files hold no FP8 weights, and config.json says otherwise"
