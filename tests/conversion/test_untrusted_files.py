"""Untrusted folders: nothing outside is reached through names from a checkpoint.

Then what every format refuses of any of its files: links, special files, missing halves, code.
"""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from checkpoint_conversion.checkpoint_folder import (
    RANK_FILE,
    file_inside,
    files_inside,
    read_json,
    require_kind,
)
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.inspection import inspect_checkpoint
from checkpoint_conversion.verify import verify
from tests.conversion.legacy_support import write_legacy
from tests.conversion.pt_support import Calls, saved
from tests.conversion.support import (
    random_tensors,
    read,
    refused,
    tiny_config,
    write_hugging_face,
    write_torch_dist,
)
from tests.support.hub_cache import as_snapshot


@pytest.fixture
def folder(tmp_path):
    """A folder with a file, a folder with a file, and a secret beside it."""
    inner = tmp_path / "checkpoint"
    (inner / "sub").mkdir(parents=True)
    (inner / "a.bin").write_text("a")
    (inner / "sub" / "b.bin").write_text("b")
    (tmp_path / "secret").write_text("secret")
    return inner


class TestFileInside:
    def test_files(self, folder):
        assert file_inside(folder, "a.bin").read_text() == "a"
        assert file_inside(folder, "sub/b.bin").read_text() == "b"

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("", "empty"),
            (".", "not a regular file"),
            ("sub", "not a regular file"),
            ("..", "leads out of the folder"),
            ("../secret", "leads out of the folder"),
            ("sub/../../secret", "leads out of the folder"),
            ("sub/../a.bin", "leads out of the folder"),
            ("/etc/passwd", "absolute"),
            ("//etc/passwd", "absolute"),
            ("a.bin\0", "cannot be printed"),
            ("a\n.bin", "cannot be printed"),
            ("\x1b[31m", "cannot be printed"),
            ("\ud800", "cannot be printed"),
            ("missing", "No such file"),
            ("a.bin/x", "Not a directory"),
            ("x" * 5000, "too long"),
        ],
    )
    @pytest.mark.parametrize("follow_links", [False, True])
    def test_refused(self, folder, name, why, follow_links):
        with refused(why) as error:
            file_inside(folder, name, follow_links=follow_links)
        str(error.value).encode()
        assert str(error.value).isprintable()

    @pytest.mark.parametrize("via", ["file", "folder", "chain", "relative"])
    def test_links_out_of_the_folder(self, folder, via):
        outside = folder.parent / "outside"
        outside.mkdir()
        (outside / "x.bin").write_text("x")
        name = "link/x.bin" if via == "folder" else "link"
        target = {
            "file": outside / "x.bin",
            "folder": outside,
            "chain": folder / "second",
            "relative": "../outside/x.bin",
        }[via]
        (folder / "second").symlink_to(outside / "x.bin")
        (folder / "link").symlink_to(target)
        with refused("--follow-links", str(outside / "x.bin")):
            file_inside(folder, name)
        assert file_inside(folder, name, follow_links=True).read_text() == "x"

    def test_links_inside(self, folder):
        (folder / "link").symlink_to("sub/b.bin")
        (folder / "up").symlink_to("..")
        assert file_inside(folder, "link") == (folder / "sub" / "b.bin").resolve()
        # Out and in again is inside.
        assert file_inside(folder, "up/checkpoint/a.bin").read_text() == "a"

    def test_folder_that_is_a_link(self, folder):
        (folder.parent / "alias").symlink_to(folder)
        assert file_inside(folder.parent / "alias", "a.bin").read_text() == "a"

    @pytest.mark.parametrize("follow_links", [False, True])
    def test_what_is_no_file(self, folder, follow_links):
        os.mkfifo(folder / "fifo")
        (folder / "circle").symlink_to("circle")
        (folder / "nowhere").symlink_to("gone")
        (folder / "device").symlink_to("/dev/zero")
        for name, why in (
            ("fifo", "not a regular file"),
            ("circle", "circle"),
            ("nowhere", "No such file"),
            ("device", "not a regular file" if follow_links else "--follow-links"),
        ):
            with refused(why):
                file_inside(folder, name, follow_links=follow_links)


class TestSnapshot:
    """Of a model in the hub's download cache."""

    @pytest.fixture
    def snapshot(self, folder):
        return as_snapshot(folder, folder.parent / "hub")

    @pytest.mark.parametrize("name", ["a.bin", "sub/b.bin"])
    def test_own_blobs(self, folder, snapshot, name):
        found = file_inside(snapshot, name)
        assert found.parent == (snapshot.parents[1] / "blobs").resolve()
        assert found.read_bytes() == (folder / name).read_bytes()
        # Of the folder inside, and through a link to the snapshot.
        (folder.parent / "alias").symlink_to(snapshot)
        inner = folder.parent / "alias" / Path(name).parent
        assert file_inside(inner, Path(name).name) == found

    @pytest.mark.parametrize(
        "target",
        [
            "../../refs/main",  # of the same model, but no blob
            "../../../models--owner--other/blobs/x",
            "../../blobs/out",  # a blob that is a link itself
            "../../../../secret",
        ],
    )
    def test_all_else_is_refused(self, folder, snapshot, target):
        model = snapshot.parents[1]
        secret = folder.parent / "secret"
        secret.write_text("secret")
        (model / "blobs" / "out").symlink_to(secret)
        for place in (model / "refs/main", model.parent / "models--owner--other/blobs/x"):
            place.parent.mkdir(parents=True)
            place.write_text("x")
        (snapshot / "link").symlink_to(target)
        with refused("link out of the folder", "--follow-links"):
            file_inside(snapshot, "link")
        assert file_inside(snapshot, "link", follow_links=True).is_file()

    def test_blobs_elsewhere(self, folder, snapshot):
        model = snapshot.parents[1]
        (model / "blobs").rename(folder.parent / "elsewhere")
        (model / "blobs").symlink_to(folder.parent / "elsewhere")
        with refused("link out of the folder"):
            file_inside(snapshot, "a.bin")

    @pytest.mark.parametrize("renamed", ["snapshots", "models--owner--tiny"])
    def test_other_folders_have_no_blobs(self, snapshot, renamed):
        place = next(path for path in snapshot.parents if path.name == renamed)
        place.rename(place.with_name("x"))
        moved = Path(str(snapshot).replace(f"/{renamed}", "/x"))
        with refused("link out of the folder"):
            file_inside(moved, "a.bin")

    def test_the_folder_of_the_model(self, snapshot):
        with refused("hub's cache; its checkpoints are the folders"):
            require_kind(snapshot.parents[1])


class TestFilesInside:
    def test_files(self, folder):
        (folder / "link").symlink_to("a.bin")
        (folder / "to_folder").symlink_to("..")
        files = files_inside(folder)
        assert list(files) == ["a.bin", "link"]
        assert files["link"] == files["a.bin"]

    def test_all_problems_in_one_error(self, folder):
        (folder / "out").symlink_to("../secret")
        (folder / "nowhere").symlink_to("gone")
        os.mkfifo(folder / "fifo")
        (folder / "x\ny").write_text("")
        with refused(problems=4):
            files_inside(folder)
        with refused(problems=3):
            files_inside(folder, follow_links=True)

    def test_no_folder(self, folder):
        with refused("No such file"):
            files_inside(folder / "missing")


class TestReadJson:
    def test_objects(self, tmp_path):
        content = {"a": [1, 2.5, None], "ä": {"b": True}}
        (tmp_path / "x").write_text(json.dumps(content, ensure_ascii=False))
        assert read_json(tmp_path / "x") == content

    @pytest.mark.parametrize(
        ("data", "why"),
        [
            (b"", "not acceptable JSON"),
            (b"{", "not acceptable JSON"),
            (b'{"a": 1}}', "not acceptable JSON"),
            (b"[1]", "must hold an object, got list"),
            (b"null", "must hold an object"),
            (b'{"a": "\xff"}', "not acceptable JSON"),
            ('{"a": 1}'.encode("utf-16"), "not acceptable JSON"),
            (b'{"a": 1, "b": {"c": 1, "c": 2}}', "c is there twice"),
            (b'{"a": 1, "\\u0061": 2}', "a is there twice"),
            (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
            (b'{"a": ' + b"[" * 200_000, "nested too deeply"),
            (b'{"a": ' + b"1" * 10_000 + b"}", "not acceptable JSON"),
            (b'{"a": "' + b"x" * 300_000 + b'"}', "larger than 262144 bytes"),
        ],
    )
    def test_refused(self, tmp_path, data, why):
        path = tmp_path / "x.json"
        path.write_bytes(data)
        with refused(str(path), why):
            read_json(path, max_bytes=1 << (21 if "deeply" in why else 18))

    def test_no_file(self, tmp_path):
        with refused("No such file"):
            read_json(tmp_path / "missing")
        with refused("Is a directory"):
            read_json(tmp_path)


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


@pytest.mark.parametrize(("kind", "name"), ALL_FILES)
def test_links_out_of_the_folder(copied, tmp_path, kind, name):
    folder = copied(kind, name)
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with refused("link out of the folder", "--follow-links ", "allows it", Path(name).name):
        read(folder)
    assert read(folder, follow_links=True)


@pytest.mark.parametrize("kind", FILES)
def test_snapshots_of_the_hub_are_read(made, tmp_path, kind):
    """Their links lead out of the folder, but not out of the model's."""
    snapshot = as_snapshot(made / kind, tmp_path)
    assert read(snapshot)
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
    with refused("link out of the folder"):
        read(folder)
    assert read(folder, follow_links=True)


@pytest.mark.parametrize(("kind", "name"), ALL_FILES)
def test_special_files(copied, kind, name):
    """Reading a FIFO would wait forever."""
    folder = copied(kind, name)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with refused():
        read(folder)


@pytest.mark.parametrize(("kind", "name"), ALL_FILES)
def test_half_a_file(copied, kind, name):
    folder = copied(kind, name)
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])
    if name == "tokenizer.json":
        assert read(folder)
        return
    with refused(Path(name).name):
        read(folder)


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
    with refused("system, which is refused", Path(name).name):
        read(folder)
    assert not (tmp_path / "owned").exists()
