"""A save that is interrupted at any step leaves a complete checkpoint to resume from.

Also on a disk that is full, or where files may not grow, which is one line.
"""

import contextlib
import errno
import logging
import resource
import shutil
from pathlib import Path

import psutil
import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from counting import count_from
from tests.support.generate import Done, train
from training import saving
from training.checkpoint import LATEST, checkpoint_path, latest_iteration
from training.saving import write_errors


class _PowerCut(BaseException):
    pass


def _save(folder: Path, iteration: int, content: str) -> None:
    saving.begin(folder)
    written = checkpoint_path(folder / ".incomplete", iteration)
    written.mkdir()
    (written / "weights").write_text(content)
    saving.complete(folder, iteration)


def _latest(folder: Path) -> str:
    iteration = latest_iteration(folder)
    saving.recover(folder, iteration)
    return (checkpoint_path(folder, iteration) / "weights").read_text()


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

    changes = [(Path, name) for name in ("rename", "replace", "mkdir", "write_text")]
    for owner, name in (*changes, (shutil, "rmtree"), (saving, "_sync")):
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
    (tmp_path / ".incomplete" / "iter_0000009").mkdir(parents=True)
    _save(tmp_path, 1, "a")
    _save(tmp_path, 1, "b")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["iter_0000001", "latest_checkpointed_iteration.txt"]
    assert _latest(tmp_path) == "b"


def test_the_latest_checkpoint(tmp_path):
    assert latest_iteration(tmp_path) is None
    (tmp_path / LATEST).write_text("released")
    with pytest.raises(ValueError, match="an iteration or 'release', got 'released'"):
        latest_iteration(tmp_path)


def test_a_release_has_no_iteration(tmp_path):
    (tmp_path / LATEST).write_text("release\n")
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "weights").write_text("released")
    assert checkpoint_path(tmp_path, latest_iteration(tmp_path)).name == "release"
    assert _latest(tmp_path) == "released"
    # A run that goes on from it in the same folder counts from there.
    _save(tmp_path, 5, "trained")
    assert latest_iteration(tmp_path) == 5
    assert _latest(tmp_path) == "trained"


def test_no_process_passes_on_what_was_written(monkeypatch):
    """Nor in a run that has saved before."""
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    before = psutil.Process().children()
    saving._write_in_this_process()
    filesystem_async.get_write_results_queue().put("results")
    saving._write_in_this_process()
    assert filesystem_async.get_write_results_queue().get_nowait() == "results"
    assert psutil.Process().children() == before
    # Releases of Megatron without that process.
    monkeypatch.delattr(filesystem_async, "_results_queue")
    saving._write_in_this_process()
    assert not hasattr(filesystem_async, "_results_queue")


SMALL = "--num-layers 1 --moe-layer-freq [0] --hidden-size 32 --ffn-hidden-size 64"
WRITER = logging.getLogger(filesystem_async.__name__)


def run(folder: Path, iterations: int, *more: object) -> Done:
    usual = f"{SMALL} --seq-length 32 --micro-batch-size 1 --global-batch-size 1 --eval-iters 0"
    argv = [*usual.split(), "--data", folder / "text.txt", "--save", folder / "saved"]
    return train(*argv, "--train-iters", iterations, *more)


@pytest.mark.skipif(torch.cuda.is_available(), reason="fp32 on the CPU")
def test_files_that_may_not_grow(tmp_path, capfd):
    (tmp_path / "text.txt").write_text(count_from(0, 700))
    assert run(tmp_path, 1).code == 0
    load = ("--load", tmp_path / "saved")
    capfd.readouterr()
    # As by a quota; needs no mount.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        done = run(tmp_path, 2, *load)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert done.code == 1
    err = done.err + capfd.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert err.startswith(f"train.py: error: --save {tmp_path / 'saved'}: iteration 2 could not")
    assert "File too large" in err and "MB free" in err
    assert "iteration 1 stays the latest" in err
    assert (tmp_path / "saved" / LATEST).read_text() == "1\n"
    assert run(tmp_path, 2, *load).code == 0
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert names == ["iter_0000001", "iter_0000002", LATEST]


def caught(folder: Path, error: BaseException, logged: str | None = None) -> str:
    with pytest.raises(OSError) as found, write_errors(folder, 7):
        if logged:
            WRITER.error(logged)
        raise error
    assert found.value.__cause__ is error
    return str(found.value)


class TestReasons:
    def test_of_the_system(self, tmp_path, monkeypatch):
        usage = shutil._ntuple_diskusage(2_000_000_000, 2_000_000_000, 0)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        full = OSError(errno.ENOSPC, "No space left on device", "a/file")
        assert caught(tmp_path, full) == (
            f"--save {tmp_path}: iteration 7 could not be written: No space left on device: "
            "a/file (its disk has 0.0 of 2,000.0 MB free); no checkpoint is there"
        )

    def test_of_torch(self, tmp_path):
        """In a file that it has opened itself, or in Megatron's writer, which only logs it."""
        short = "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"
        failed = CheckpointException("write", {})
        for text in (caught(tmp_path, RuntimeError(short)), caught(tmp_path, failed, short)):
            assert "torch could not write all of it, the disk may be full" in text

    def test_another_of_megatrons_writer(self, tmp_path, capfd):
        found = caught(tmp_path, CheckpointException("write", {}), "Local worker 0: no tensor")
        assert "could not be written: Local worker 0: no tensor (its disk" in found
        assert capfd.readouterr().err == ""

    def test_mistakes_stay_what_they_are(self, tmp_path):
        with pytest.raises(RuntimeError, match="shape"), write_errors(tmp_path, 7):
            raise RuntimeError("shape")
