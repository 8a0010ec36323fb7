"""Names from a checkpoint: nothing outside its folder may be reached through them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from checkpoint_conversion.checkpoint_folder import (
    file_inside,
    files_inside,
    read_json,
    require_kind,
)
from checkpoint_conversion.errors import CheckpointError
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
        with pytest.raises(CheckpointError, match=why) as error:
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
        with pytest.raises(CheckpointError, match="--follow-links") as error:
            file_inside(folder, name)
        assert str(outside / "x.bin") in str(error.value)
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
            ("circle", "circle|levels of symbolic links"),
            ("nowhere", "No such file"),
            ("device", "not a regular file" if follow_links else "--follow-links"),
        ):
            with pytest.raises(CheckpointError, match=why):
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
        with pytest.raises(CheckpointError, match=r"link out of the folder.*--follow-links"):
            file_inside(snapshot, "link")
        assert file_inside(snapshot, "link", follow_links=True).is_file()

    def test_blobs_elsewhere(self, folder, snapshot):
        model = snapshot.parents[1]
        (model / "blobs").rename(folder.parent / "elsewhere")
        (model / "blobs").symlink_to(folder.parent / "elsewhere")
        with pytest.raises(CheckpointError, match="link out of the folder"):
            file_inside(snapshot, "a.bin")

    @pytest.mark.parametrize("renamed", ["snapshots", "models--owner--tiny"])
    def test_other_folders_have_no_blobs(self, snapshot, renamed):
        place = next(path for path in snapshot.parents if path.name == renamed)
        place.rename(place.with_name("x"))
        moved = Path(str(snapshot).replace(f"/{renamed}", "/x"))
        with pytest.raises(CheckpointError, match="link out of the folder"):
            file_inside(moved, "a.bin")

    def test_the_folder_of_the_model(self, snapshot):
        with pytest.raises(CheckpointError, match="hub's cache; its checkpoints are the folders"):
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
        with pytest.raises(CheckpointError) as error:
            files_inside(folder)
        assert len(error.value.problems) == 4
        with pytest.raises(CheckpointError) as error:
            files_inside(folder, follow_links=True)
        assert len(error.value.problems) == 3

    def test_no_folder(self, folder):
        with pytest.raises(CheckpointError, match="No such file"):
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
        with pytest.raises(CheckpointError, match=re.escape(str(path)) + ".*" + why):
            read_json(path, max_bytes=1 << (21 if "deeply" in why else 18))

    def test_no_file(self, tmp_path):
        with pytest.raises(CheckpointError, match="No such file"):
            read_json(tmp_path / "missing")
        with pytest.raises(CheckpointError, match="Is a directory"):
            read_json(tmp_path)
