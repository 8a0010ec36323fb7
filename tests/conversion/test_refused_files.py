"""What every format refuses of any of its files: links, special files, missing halves, code."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from checkpoint_conversion.checkpoint_folder import RANK_FILE
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.inspection import inspect_checkpoint
from checkpoint_conversion.verify import verify
from tests.conversion.legacy_support import write_legacy
from tests.conversion.pt_support import Calls, saved
from tests.conversion.support import (
    load_all,
    random_tensors,
    tiny_config,
    write_hugging_face,
    write_torch_dist,
)
from tests.support.hub_cache import as_snapshot

CONFIG = tiny_config()
TENSORS = random_tensors(CONFIG)
# Format -> the files that its reader opens.
FILES = {
    "hf": [
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
    ],
    "megatron": [
        "release/.metadata",
        "release/metadata.json",
        "release/common.pt",
        "release/__0_0.distcp",
        "release/hugging_face/config.json",
    ],
    "megatron-legacy": [
        f"release/mp_rank_00/{RANK_FILE}",
        f"release/mp_rank_01/{RANK_FILE}",
        "release/hugging_face/config.json",
    ],
}
ALL_FILES = [(kind, name) for kind, names in FILES.items() for name in names]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_hugging_face(folder / "hf", CONFIG, TENSORS)
    (folder / "hf/tokenizer.json").write_text("{}")
    write_torch_dist(folder / "megatron", CONFIG, TENSORS)
    write_legacy(folder / "megatron-legacy", CONFIG, TENSORS, tensor_parallel=2)
    return folder


@pytest.fixture
def copied(made, tmp_path):
    """Copies a checkpoint whose reader needs the file called ``name``."""

    def copy(kind: str, name: str) -> Path:
        folder = Path(shutil.copytree(made / kind, tmp_path / kind))
        if name.endswith((".pt", ".metadata")):
            # Else the arguments in common.pt would not be needed to describe the model.
            (folder / "release/hugging_face/config.json").unlink()
        return folder

    return copy


def read(folder: Path, **options) -> None:
    assert load_all(open_checkpoint(folder, **options).hugging_face_tensors())


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read(folder)
    for word in words:
        assert re.search(word, str(error.value)), f"{word!r} is not in {error.value}"


@pytest.mark.parametrize(("kind", "name"), ALL_FILES)
def test_links_out_of_the_folder(copied, tmp_path, kind, name):
    folder = copied(kind, name)
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    refused(folder, "link out of the folder.*--follow-links .*allows it", Path(name).name)
    read(folder, follow_links=True)


@pytest.mark.parametrize("kind", FILES)
def test_snapshots_of_the_hub_are_read(made, tmp_path, kind):
    """Their links lead out of the folder, but not out of the model's."""
    snapshot = as_snapshot(made / kind, tmp_path)
    read(snapshot)
    names = {path.name for path in open_checkpoint(snapshot).auxiliary_folder.iterdir()}
    assert set(open_checkpoint(snapshot).auxiliary) <= names
    if kind == "hf":
        inspected = inspect_checkpoint(snapshot)
        assert not inspected.problems and inspected.auxiliary == ["config.json", "tokenizer.json"]
    assert not verify(snapshot, made / kind, logits=False).differences


@pytest.mark.parametrize("kind", ["megatron", "megatron-legacy"])
def test_the_folder_of_the_iteration_is_a_link(copied, tmp_path, kind):
    folder = copied(kind, "")
    (folder / "release").rename(tmp_path / "elsewhere")
    (folder / "release").symlink_to(tmp_path / "elsewhere")
    refused(folder, "link out of the folder")
    read(folder, follow_links=True)


@pytest.mark.parametrize(("kind", "name"), ALL_FILES)
def test_special_files(copied, kind, name):
    """Reading a FIFO would wait forever."""
    folder = copied(kind, name)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError):
        read(folder)


@pytest.mark.parametrize(("kind", "name"), ALL_FILES)
def test_half_a_file(copied, kind, name):
    folder = copied(kind, name)
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])
    if name == "tokenizer.json":
        read(folder)
    else:
        refused(folder, Path(name).name)


CALL = Calls(os.system, "touch owned")


@pytest.mark.parametrize(
    ("kind", "name", "content"),
    [
        ("megatron-legacy", FILES["megatron-legacy"][0], saved({"model": {}, "args": CALL})),
        ("megatron", "release/common.pt", saved({"args": CALL})),
        ("megatron", "release/.metadata", pickle.dumps(Metadata({}, planner_data=CALL))),
    ],
    ids=["rank", "common", "metadata"],
)
def test_code_is_refused_by_name_and_not_run(copied, monkeypatch, tmp_path, kind, name, content):
    monkeypatch.chdir(tmp_path)
    folder = copied(kind, name)
    (folder / name).write_bytes(content)
    refused(folder, r"system, which is refused", Path(name).name)
    assert not (tmp_path / "owned").exists()
