"""A disk that is full before or while a target is written, and files that may not grow further."""

import errno
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from checkpoint_conversion import cli
from checkpoint_conversion.formats import TARGETS
from tests.conversion.processes import run
from tests.conversion.support import random_tensors, tiny_config, write_hugging_face
from tests.conversion.test_killed import ONE_THREAD, contents

# Several parts, which do not fit together into the free space.
SHARDS = ("--max-shard-size", "200kB")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """0.7 MB."""
    config = tiny_config(vocab_size=512, hidden_size=128, intermediate_size=256)
    folder = tmp_path_factory.mktemp("disk") / "source"
    return write_hugging_face(folder, config, random_tensors(config))


class Disk:
    """A file system in memory with room for less than a target."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def mount(self) -> bool:
        self.folder.mkdir()
        return self._mount("size=600k")

    def make_room(self) -> None:
        assert self._mount("remount,size=20m")

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", self.folder], check=True)

    def _mount(self, options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", self.folder]
        return subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path / "disk")
    if shutil.which("mount") is None or not disk.mount():
        pytest.skip("needs a user who may mount a tmpfs")
    yield disk
    disk.unmount()


@pytest.fixture
def hidden_usage(monkeypatch):
    """The disk says that it is empty, and fills up while the target is written."""
    usage = shutil._ntuple_diskusage(10**12, 0, 10**12)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


def command(source: Path, target: Path, to: str) -> list[str]:
    return ["convert", str(source), str(target), "--to", to, *SHARDS, *ONE_THREAD]


@pytest.fixture(params=TARGETS)
def whole(request, source, tmp_path) -> tuple[str, dict[str, str]]:
    """A format, and what an undisturbed conversion writes."""
    assert cli.main(command(source, tmp_path / "whole", request.param)) == 0
    return request.param, contents(tmp_path / "whole")


def test_full_while_writing(source, disk, whole, hidden_usage, capsys):
    to, expected = whole
    before, target = contents(source), disk.folder / "out"
    capsys.readouterr()
    assert cli.main(command(source, target, to)) == cli.FILE_SYSTEM
    message = capsys.readouterr().err
    # torch.save does not say why it could not write a file that it opened itself.
    assert re.search("No space left on device: |the disk may be full: ", message), message
    assert "parts are finished and kept; --resume" in message
    assert "bug" not in message
    assert not target.exists()
    assert contents(source) == before
    disk.make_room()
    assert cli.main([*command(source, target, to), "--resume"]) == 0
    assert contents(target) == expected
    assert [path.name for path in disk.folder.iterdir()] == ["out"]


def test_files_that_may_not_grow(source, tmp_path, whole):
    """What a quota or an old file system does; works without mounting anything."""
    to, expected = whole
    before, target = contents(source), tmp_path / "out"
    done = run(tmp_path / "output", *command(source, target, to), largest_file=100_000)
    assert done.code == cli.FILE_SYSTEM, done
    assert "File too large: " in done.err, done.err
    assert not target.exists()
    assert contents(source) == before
    assert run(tmp_path / "output", *command(source, target, to), "--resume").code == 0
    assert contents(target) == expected


def test_folder_that_may_not_be_written(source, tmp_path, monkeypatch, capsys):
    """Root may write anywhere, so the system call is made to fail."""

    def refused(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refused)
    assert cli.main(command(source, tmp_path / "a" / "out", "hf")) == cli.FILE_SYSTEM
    assert capsys.readouterr().err.startswith("error: Permission denied: ")
