"""scripts/train.py on a disk that is full, or where files may not grow."""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException
from training.checkpoint_folder import LATEST
from training.write_errors import write_errors

from counting import count_from
from tests.support.generate import Done, train
from training import distributed

SMALL = "--num-layers 1 --moe-layer-freq [0] --hidden-size 32 --ffn-hidden-size 64"
WRITER = logging.getLogger(filesystem_async.__name__)


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file can grow beyond ``size`` bytes, as by a quota; needs no mount."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run(folder: Path, iterations: int, *more: object) -> Done:
    usual = f"{SMALL} --seq-length 32 --micro-batch-size 1 --global-batch-size 1 --eval-iters 0"
    distributed.seed(1234)
    argv = [*usual.split(), "--data", folder / "text.txt", "--save", folder / "saved"]
    return train(*argv, "--train-iters", iterations, *more)


@pytest.mark.skipif(torch.cuda.is_available(), reason="fp32 on the CPU")
def test_files_that_may_not_grow(tmp_path, capfd):
    (tmp_path / "text.txt").write_text(count_from(0, 700))
    assert run(tmp_path, 1).code == 0
    load = ("--load", tmp_path / "saved")
    capfd.readouterr()
    with largest_file(50_000):
        done = run(tmp_path, 2, *load)
    assert done.code == 1
    err = done.err + capfd.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert err.startswith(f"train.py: error: --save {tmp_path / 'saved'}: iteration 2 could not")
    assert "the disk may be full" in err and "MB free" in err
    assert "iteration 1 stays the latest" in err
    assert (tmp_path / "saved" / LATEST).read_text() == "1\n"
    assert run(tmp_path, 2, *load).code == 0
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "iter_0000001",
        "iter_0000002",
        LATEST,
    ]


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
