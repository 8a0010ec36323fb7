"""Reading Hugging Face checkpoints: every tensor, bit by bit, and no more of a file than needed.

Then folders that are damaged, contradictory or mean harm: everything is listed.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_conversion.checkpoint_folder import kind_of
from checkpoint_conversion.errors import CheckpointError
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
    write_model,
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
        assert checkpoint.layout["quantisation"] == "FP8"
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
        assert note == "the files hold no quantised weights, and config.json says otherwise"


FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))


@pytest.fixture
def folder(tmp_path):
    """A good checkpoint of two files."""
    return write_model(tmp_path / "checkpoint")


def weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def refuse(folder: Path, *reasons: str, follow_links: bool = False) -> CheckpointError:
    """Opening fails, with exactly these problems, or with one message."""
    with pytest.raises(CheckpointError) as error:
        HuggingFaceCheckpoint(folder, follow_links=follow_links)
    text = str(error.value)
    for reason in reasons:
        assert re.search(reason, text), f"{reason!r} is not in {text}"
    if error.value.problems:
        assert len(error.value.problems) == len(reasons)
    return error.value


class TestIndexAndFiles:
    def test_everything_they_do_not_agree_on(self, folder):
        names = weight_map(folder)
        first = load_file(folder / FIRST)
        moved, both, lost, extra = (*list(first)[:3], "model.extra.weight")
        second = load_file(folder / SECOND) | {both: first[both], extra: torch.ones(2)}
        second[moved] = first.pop(moved)
        del first[lost]
        save_file(first, folder / FIRST)
        save_file(second, folder / SECOND)
        save_file({"x": torch.ones(1)}, folder / "unnamed.safetensors")
        names["model.announced.weight"] = SECOND
        names["model.elsewhere.weight"] = "missing.safetensors"
        change_json(folder / INDEX, weight_map=names)
        refuse(
            folder,
            f"unnamed.safetensors is there, but {INDEX} does not name it",
            "missing.safetensors .* No such file",
            f"{INDEX} has {moved} in {FIRST}, which does not hold it",
            f"{moved} is in {SECOND}, but {INDEX} has it in {FIRST}",
            f"{both} is in {SECOND}, but {INDEX} has it in {FIRST}",
            f"{INDEX} has {lost} in {FIRST}, which does not hold it",
            f"{INDEX} has model.announced.weight in {SECOND}, which does not hold it",
            f"{extra} is in {SECOND}, but not in {INDEX}",
        )

    @pytest.mark.parametrize("spelling", [f"./{FIRST}", f"sub/../{FIRST}", "link.safetensors"])
    def test_one_file_under_two_names(self, folder, spelling):
        (folder / "link.safetensors").symlink_to(FIRST)
        names = weight_map(folder)
        name = next(name for name, file in names.items() if file == FIRST)
        change_json(folder / INDEX, weight_map={**names, name: spelling})
        with refused():
            HuggingFaceCheckpoint(folder)

    def test_files_without_an_index(self, folder):
        (folder / INDEX).unlink()
        refuse(folder, f"neither {SINGLE} alone nor {INDEX}.*(\n.*){{2}}", "model-00002-of-00002")

    def test_single_file_beside_others(self, folder):
        (folder / INDEX).unlink()
        (folder / FIRST).rename(folder / SINGLE)
        refuse(folder, SINGLE, SECOND)

    def test_no_config(self, folder):
        (folder / "config.json").unlink()
        refuse(folder, "has no config.json")

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            ({}, ["has no object weight_map"]),
            ({"weight_map": [FIRST]}, ["has no object weight_map"]),
            ({"weight_map": {"a": 1, "b": None, "c": FIRST, "d": ["x"]}}, ["a: 1", "b: ", "d: "]),
        ],
    )
    def test_weight_map(self, folder, content, why):
        (folder / INDEX).write_text(json.dumps(content))
        with refused(*why):
            HuggingFaceCheckpoint(folder)


class TestNames:
    @pytest.mark.parametrize(
        ("name", "why"),
        [
            # All that a name can be is in test_untrusted_files.
            ("sub/../../secret.safetensors", "leads out of the folder"),
            ("{outside}/secret.safetensors", "is an absolute path"),
            ("\x1b]0;harm\x07", "cannot be printed"),
        ],
    )
    @pytest.mark.parametrize("follow_links", [False, True])
    def test_files_that_the_index_names(self, folder, name, why, follow_links):
        save_file({"stolen": torch.ones(1)}, folder.parent / "secret.safetensors")
        names = {**weight_map(folder), "stolen": name.replace("{outside}", str(folder.parent))}
        change_json(folder / INDEX, weight_map=names)
        error = refuse(folder, why, follow_links=follow_links)
        str(error).encode()
        assert "\x1b" not in str(error)

    def test_tensor_that_harms_a_terminal(self, folder):
        (folder / INDEX).unlink()
        for file in (FIRST, SECOND):
            (folder / file).unlink()
        save_file({"\x1b[2J": torch.ones(1)}, folder / SINGLE)
        error = refuse(folder, "has characters that cannot be printed")
        assert "\x1b" not in str(error)


F32 = described("F32", [2], 0, 8)
# safetensors refuses many more by itself; fuzzing tries them.
MALFORMED = {
    "empty": b"",
    "no header": safetensors_bytes(b"", b"", 0),
    "largest header": safetensors_bytes({"x": F32}, bytes(8), 2**64 - 1),
    "no JSON": safetensors_bytes(b"{x}", b""),
    "nested": safetensors_bytes(b'{"x":' * 100_000, b""),
    "truncated": safetensors_bytes({"x": F32}, bytes(7)),
    "overlapping": safetensors_bytes({"x": F32, "y": described("F32", [2], 4, 12)}, bytes(12)),
    "shape and bytes": safetensors_bytes({"x": described("F32", [3], 0, 8)}, bytes(8)),
    "unknown dtype": safetensors_bytes({"x": described("Q3", [2], 0, 8)}, bytes(8)),
    "dtype torch has not": safetensors_bytes({"x": described("F6_E2M3", [8], 0, 6)}, bytes(6)),
    "size torch has not": safetensors_bytes({"x": described("F32", [0, 2**63], 0, 0)}, b""),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_safetensors(folder, kind):
    (folder / SECOND).write_bytes(MALFORMED[kind])
    # Its tensors are not reported as missing one by one.
    with refused(SECOND, problems=1):
        HuggingFaceCheckpoint(folder)


def test_all_malformed_files_are_named(folder):
    for file in (FIRST, SECOND):
        (folder / file).write_bytes(b"")
    refuse(folder, FIRST, SECOND)


def test_wrong_tensors_in_one_error(folder):
    tensors = load_file(folder / FIRST) | load_file(folder / SECOND)
    attention = "model.layers.0.self_attn."
    tensors[f"{attention}q_x_proj.weight"] = tensors.pop(f"{attention}q_a_proj.weight")
    tensors["model.norm.weight"] = torch.ones(3)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e5m2)
    for file in (FIRST, SECOND, INDEX):
        (folder / file).unlink()
    save_file(tensors, folder / SINGLE)
    with refused(
        "q_a_proj.weight is missing",
        "the nearest known name is model.layers.0.self_attn.q_a_proj.weight",
        "model.norm.weight has shape (3,); expected (32,)",
        "lm_head.weight is torch.float8_e5m2",
        problems=4,
    ):
        HuggingFaceCheckpoint(folder).hugging_face_tensors()
