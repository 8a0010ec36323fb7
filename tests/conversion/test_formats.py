"""From any format to any other and back, the tensors are the same to the last bit."""

import shutil
from pathlib import Path

import pytest
import torch

from checkpoint_conversion.convert import convert
from checkpoint_conversion.formats import TARGETS, open_checkpoint
from checkpoint_conversion.formats.base import TargetOptions
from checkpoint_conversion.manifest import find_manifest, read_manifest
from tests.conversion.legacy_support import write_legacy
from tests.conversion.support import (
    CONFIGS,
    IN_FLOAT32,
    assert_same_tensors,
    random_tensors,
    read,
    refused,
    tiny_config,
    write_hugging_face,
)
from tests.support.combinations import grid, thinned

LEGACY = "megatron-legacy"
LAYOUTS = [
    ("megatron", {"norms": "fused", "kv_up": "combined", "down": "separate"}),
    ("megatron", {"norms": "fused", "kv_up": "split", "down": "fused"}),
    ("megatron", {"norms": "separate", "kv_up": "combined", "down": "fused"}),
    ("megatron", {"norms": "separate", "kv_up": "split", "down": "separate"}),
    ("megatron", {"layers": "numbered"}),
    ("megatron", {"vocab_multiple": 48, "iteration": 7}),
    ("absorbed", {"norms": "fused"}),
    ("absorbed", {"layers": "numbered"}),
]
# Of a model whose layers are all alike, which Megatron can store as one tensor.
STACKED = [
    ("megatron", {"layers": "stacked", "norms": "separate"}),
    ("megatron", {"layers": "numbered", "down": "fused"}),
    ("absorbed", {"layers": "stacked"}),
]
# Of which every format is converted to every other.
PAIRED = ("v3", "mtp", "shared")
# Of models with an indexer, whose attention has norms and down-projections of its own only.
SPARSE = [
    ("megatron", {"norms": "separate", "kv_up": "split"}),
    ("megatron", {"vocab_multiple": 48, "iteration": 7}),
    ("absorbed", {"norms": "fused"}),
]


def name_of(value) -> str | None:
    return ",".join(map(str, value.values())) if isinstance(value, dict) else None


class Model:
    """A tiny model in a Hugging Face folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.config = tiny_config(**CONFIGS[name])
        self.tensors = random_tensors(self.config)
        self.path = write_hugging_face(folder / name, self.config, self.tensors)
        (self.path / "tokenizer.json").write_text('{"version": "1.0"}')


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("formats")
    return {name: Model(folder, name) for name in CONFIGS}


def check_same(model: Model, path: Path) -> None:
    checkpoint = open_checkpoint(path)
    assert checkpoint.format == "hf"
    assert_same_tensors(read(path), model.tensors)
    assert (path / "tokenizer.json").read_bytes() == (model.path / "tokenizer.json").read_bytes()
    assert not checkpoint.notes
    assert checkpoint.config == model.config
    assert checkpoint.config.hugging_face == model.config.hugging_face


# Others: test_from_each_to_each. Of both formats: test_every_layout_there_and_back, test_logits.py
# and test_megatron_checkpoints.py.
@grid(
    1,
    {"name": [name for name in CONFIGS if name not in PAIRED], "to": ("megatron", "absorbed")},
    unless=lambda row: thinned() and row["name"] in ("dense", "v32"),
)
def test_there_and_back(models, tmp_path, name, to):
    there_and_back(models[name], tmp_path, to, {})


@pytest.mark.parametrize(
    ("name", "to", "options"),
    [("v3", *layout) for layout in LAYOUTS]
    + [("dense", *layout) for layout in STACKED]
    + [("v32", *layout) for layout in SPARSE]
    # It has no query down-projection to fuse.
    + [("v2_lite", *layout) for layout in LAYOUTS[:5] if layout[1].get("down") != "fused"],
    ids=name_of,
)
def test_every_layout_there_and_back(models, tmp_path, name, to, options):
    there_and_back(models[name], tmp_path, to, options)


def there_and_back(model: Model, folder: Path, to: str, options: dict) -> None:
    report = convert(model.path, folder / "there", to, TargetOptions(**options))
    there = open_checkpoint(folder / "there")
    assert there.format == to
    assert not there.left_alone
    # What the target is said to be is what it is recognised as.
    assert there.layout == report.as_json()["target"]["layout"]
    manifest = read_manifest(find_manifest(folder / "there"))
    assert manifest.target["layout"] == there.layout
    convert(folder / "there", folder / "back", "hf")
    check_same(model, folder / "back")


def write_first(model: Model, folder: Path, kind: str) -> None:
    """The model in a format; in files per rank, which the package does not write, by the tests."""
    if kind != LEGACY:
        convert(model.path, folder, kind)
        return
    write_legacy(folder, model.config, model.tensors, tensor_parallel=2, pipeline_parallel=3)
    shutil.copy(model.path / "tokenizer.json", folder / "release/hugging_face")


@grid(
    2,
    {"name": PAIRED, "first": [*TARGETS, LEGACY], "second": TARGETS},
    unless=lambda row: row["first"] == row["second"],
)
def test_from_each_to_each(models, tmp_path, name, first, second):
    model = models[name]
    write_first(model, tmp_path / "first", first)
    assert open_checkpoint(tmp_path / "first").format == first
    convert(tmp_path / "first", tmp_path / "second", second)
    assert open_checkpoint(tmp_path / "second").format == second
    convert(tmp_path / "second", tmp_path / "back", "hf")
    check_same(model, tmp_path / "back")


def test_files_per_rank_are_not_written(models, tmp_path):
    with refused("read, not written; --to can be hf, megatron, absorbed"):
        convert(models["v3"].path, tmp_path / "out", LEGACY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["megatron", "absorbed"])
def test_back_from_another_format_is_the_same_checkpoint(models, tmp_path, to):
    """Standard to absorbed to standard: also the other way round, nothing is lost."""
    convert(models["v3"].path, tmp_path / "a", to)
    convert(tmp_path / "a", tmp_path / "b", "absorbed" if to != "absorbed" else "megatron")
    convert(tmp_path / "b", tmp_path / "c", to)
    before, after = (
        {(r.key, r.offset): (r.shape, r.dtype, r.checksum) for r in manifest.tensors}
        for manifest in (read_manifest(find_manifest(tmp_path / name)) for name in "ac")
    )
    assert before == after


@grid(1, {"name": ("v3", "v32"), "to": TARGETS})
def test_dtype_of_the_target(models, tmp_path, name, to):
    """Rounded once; what transformers keeps in float32 keeps its own."""
    model = models[name]
    convert(model.path, tmp_path / "there", to, TargetOptions(dtype=torch.float16))
    config = open_checkpoint(tmp_path / "there").config
    assert config.hugging_face["torch_dtype"] == "float16"
    expected = {
        name: tensor if name.endswith(IN_FLOAT32) else tensor.half()
        for name, tensor in model.tensors.items()
    }
    assert_same_tensors(read(tmp_path / "there"), expected)


@pytest.mark.parametrize("to", TARGETS)
def test_mtp_layers_left_out(models, tmp_path, to):
    model = models["mtp"]
    convert(model.path, tmp_path / "there", to, exclude_mtp=True)
    checkpoint = open_checkpoint(tmp_path / "there")
    assert checkpoint.config.mtp_layers == 0
    assert checkpoint.config.hugging_face["num_nextn_predict_layers"] == 0
    kept = {k: v for k, v in model.tensors.items() if not k.startswith("model.layers.3.")}
    assert_same_tensors(read(tmp_path / "there"), kept)
    manifest = read_manifest(find_manifest(tmp_path / "there"))
    left_out = model.tensors.keys() - kept.keys()
    assert manifest.left_out == dict.fromkeys(left_out, "--exclude-mtp")
