"""A save that is interrupted at any step leaves a complete checkpoint to resume from."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest

from training import checkpoint_folder as folders


class _PowerCut(BaseException):
    pass


def _save(folder: Path, iteration: int, content: str) -> None:
    path = folders.begin(folder, iteration)
    (path / "weights").write_text(content)
    folders.complete(folder, iteration)


def _latest(folder: Path) -> str:
    iteration = folders.latest_iteration(folder)
    folders.recover(folder, iteration)
    return (folders.checkpoint_path(folder, iteration) / "weights").read_text()


def _cut_power_at(monkeypatch, step: int) -> list[int]:
    """Let every change to the disk count, and the one of number ``step`` not happen."""
    count = [0]

    def counted(function):
        def call(*args, **kwargs):
            count[0] += 1
            if count[0] == step:
                raise _PowerCut
            return function(*args, **kwargs)

        return call

    for owner, name in (
        (Path, "rename"),
        (Path, "replace"),
        (Path, "mkdir"),
        (Path, "write_text"),
        (shutil, "rmtree"),
        (folders, "_sync"),
    ):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    return count


@pytest.mark.parametrize("iteration", [1, 2], ids=["replacing", "new"])
def test_interrupted_at_every_step(tmp_path, iteration):
    step = 0
    while True:
        step += 1
        folder = tmp_path / str(step)
        _save(folder, 1, "old")
        with pytest.MonkeyPatch.context() as monkeypatch:
            count = _cut_power_at(monkeypatch, step)
            with contextlib.suppress(_PowerCut):
                _save(folder, iteration, "new")
        finished = count[0] < step
        assert _latest(folder) in (("new",) if finished else ("old", "new")), f"step {step}"
        # The next save works, whatever the interrupted one left.
        _save(folder, 3, "next")
        assert _latest(folder) == "next"
        if finished:
            break
    assert step > 8


def test_nothing_is_left_over(tmp_path):
    (tmp_path / ".incomplete-iter_0000009").mkdir()
    _save(tmp_path, 1, "a")
    _save(tmp_path, 1, "b")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["iter_0000001", "latest_checkpointed_iteration.txt"]
    assert _latest(tmp_path) == "b"


def test_no_checkpoint_yet(tmp_path):
    assert folders.latest_iteration(tmp_path) is None


def test_a_damaged_text_file_is_an_error(tmp_path):
    (tmp_path / folders.LATEST).write_text("released")
    with pytest.raises(ValueError, match="an iteration or 'release', got 'released'"):
        folders.latest_iteration(tmp_path)


def test_a_release_has_no_iteration(tmp_path):
    (tmp_path / folders.LATEST).write_text("release\n")
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "weights").write_text("released")
    assert folders.checkpoint_path(tmp_path, folders.latest_iteration(tmp_path)).name == "release"
    assert _latest(tmp_path) == "released"
    # A run that goes on from it in the same folder counts from there.
    _save(tmp_path, 5, "trained")
    assert folders.latest_iteration(tmp_path) == 5
    assert _latest(tmp_path) == "trained"
