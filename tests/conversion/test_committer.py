"""The disk is waited for beside the writing, and the journal names only what is on it."""

from __future__ import annotations

import os
import threading

import pytest

from checkpoint_conversion.convert import convert
from checkpoint_conversion.formats import TARGETS
from checkpoint_conversion.formats.base import Part, TargetOptions
from checkpoint_conversion.journal import Journal
from checkpoint_conversion.part_runner import Committer, MemoryBudget, StoppedError, run_parts

# Seconds after which a test that waits for another thread gives up.
PATIENCE = 30


def parts(count: int) -> list[Part]:
    return [Part(str(i), (), 1) for i in range(count)]


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("to", TARGETS)
def test_the_journal_names_what_is_on_the_disk(tiny_folder, tmp_path, monkeypatch, to, workers):
    """Files and the folders they are in, before the journal's line is written at all."""
    synced, named = set(), []
    fsync, append = os.fsync, Journal._append

    def recorded(descriptor):
        fsync(descriptor)
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))

    def checked(journal, *documents):
        for document in documents:
            for file in document.get("part", {"files": ()})["files"]:
                path = (tmp_path / ".out.converting/checkpoint" / file).resolve()
                named.append(path.name)
                assert str(path) in synced, path
                while path.name != "checkpoint":
                    path = path.parent
                    assert str(path) in synced, path
        append(journal, *documents)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(Journal, "_append", checked)
    options = TargetOptions(max_shard_bytes=20_000)
    report = convert(tiny_folder, tmp_path / "out", to, options, workers=workers)
    assert len(named) == len(report.plan.parts) > 3


def test_memory_is_given_back_before_the_disk_is_waited_for():
    """With room for one part, the second is written while the first waits for the disk."""
    second = threading.Event()
    committed = []

    def write(part):
        if part.name == "1":
            second.set()
        return part.name

    def commit(names):
        assert second.wait(PATIENCE), "the second part waits for the first one's disk"
        committed.extend(names)

    with Committer(commit, lambda: None) as committer:
        run_parts(parts(2), write, MemoryBudget(1), 2, committer.submit)
    assert committed == ["0", "1"]


def test_what_was_written_meanwhile_is_committed_together():
    written, batches = threading.Semaphore(0), []

    def write(part):
        return part.name

    def submit(name):
        committer.submit(name)
        written.release()

    def commit(names):
        if not batches:
            for _ in range(4):
                assert written.acquire(timeout=PATIENCE)
        batches.append(sorted(names))

    with Committer(commit, lambda: None) as committer:
        run_parts(parts(4), write, MemoryBudget(9), 4, submit)
    assert sorted(name for batch in batches for name in batch) == ["0", "1", "2", "3"]
    assert len(batches) <= 2


@pytest.mark.parametrize("beside", [True, False])
def test_a_failure_stops_the_writing(beside):
    budget = MemoryBudget(1)
    written = []

    def write(part):
        written.append(part.name)
        return part.name

    def commit(names):
        raise OSError(28, "No space left on device")

    committer = Committer(commit, budget.stop, beside)
    with pytest.raises(OSError, match="No space left"), committer:
        run_parts(parts(2), write, budget, 1, committer.submit)
        # Whoever comes after the failure does not begin.
        committer._thread.join(PATIENCE)
        run_parts(parts(50), write, budget, 1)
    assert len(written) < 50
    with pytest.raises(StoppedError):
        budget.check()


def test_the_first_error_is_the_one_that_is_raised():
    def commit(names):
        raise OSError("the disk")

    failed = threading.Event()
    committer = Committer(commit, failed.set)
    with pytest.raises(ValueError, match="the part"), committer:
        committer.submit("a")
        assert failed.wait(PATIENCE)
        raise ValueError("the part")
