"""Threads within a bound on memory, stopped by the first error; the disk is waited for beside."""

import os
import threading
import time

import pytest
import torch

from checkpoint_conversion.convert import convert
from checkpoint_conversion.formats import TARGETS
from checkpoint_conversion.formats.base import Part, TargetOptions
from checkpoint_conversion.journal import Journal
from checkpoint_conversion.part_runner import (
    Committer,
    MemoryBudget,
    StoppedError,
    file_errors,
    run_parts,
)

# Seconds after which a test that waits for another thread gives up.
PATIENCE = 30


def parts(*peaks: int) -> list[Part]:
    return [Part(str(i), (), peak) for i, peak in enumerate(peaks)]


def name_of(part: Part) -> str:
    return part.name


class Watch:
    """Counts what runs at the same time.

    Args:
        patience: Seconds that a part waits for another one beside it, until there was one.
    """

    def __init__(self, patience: float = 0) -> None:
        self.patience = patience
        self.together = threading.Event()
        self.lock = threading.Lock()
        self.running = self.memory = self.most_running = self.most_memory = 0
        self.done: list[str] = []

    def write(self, part: Part) -> None:
        with self.lock:
            self.running += 1
            self.memory += part.peak
            self.most_running = max(self.most_running, self.running)
            self.most_memory = max(self.most_memory, self.memory)
            if self.running > 1:
                self.together.set()
        self.together.wait(self.patience)
        time.sleep(0.01)
        with self.lock:
            self.running -= 1
            self.memory -= part.peak
            self.done.append(part.name)


class TestBudget:
    def test_all_run_within_the_bound(self):
        watch = Watch(patience=2)
        run_parts(parts(*([3, 1, 2] * 8)), watch.write, MemoryBudget(5), workers=4)
        assert sorted(watch.done, key=int) == [str(i) for i in range(24)]
        assert watch.most_memory <= 5
        assert watch.most_running > 1

    def test_one_that_needs_more_than_the_bound_runs_alone(self):
        watch = Watch()
        run_parts(parts(1, 9, 1, 9, 1), watch.write, MemoryBudget(5), workers=4)
        assert len(watch.done) == 5
        assert watch.most_memory == 9

    def test_first_error_stops_those_that_run_and_those_that_wait(self):
        budget = MemoryBudget(2)
        stopped, begun = [], threading.Event()

        def write(part: Part) -> None:
            if part.name == "0":
                begun.wait(60)
                raise ValueError("disk on fire")
            begun.set()
            try:
                for _ in range(6000):
                    budget.check()
                    time.sleep(0.01)
            except StoppedError:
                stopped.append(part.name)
                raise

        start = time.monotonic()
        # Two run, the third waits for memory, the others for a thread.
        with pytest.raises(ValueError, match="on fire"):
            run_parts(parts(*[1] * 20), write, budget, workers=3)
        # The part that ran would have taken a minute.
        assert time.monotonic() - start < 30
        # The one that ran, and perhaps one that got the memory of the one that failed: which one,
        # and whether, depends on how soon the failure is noticed.
        assert "1" in stopped and len(stopped) <= 2

    def test_memory_is_given_back_after_an_error(self):
        budget = MemoryBudget(1)
        with pytest.raises(KeyError), budget.reserve(1):
            raise KeyError
        with budget.reserve(1):
            pass


class TestCommitter:
    @pytest.mark.parametrize("workers", [1, 4])
    @pytest.mark.parametrize("to", TARGETS)
    def test_the_journal_names_what_is_on_the_disk(
        self, tiny_folder, tmp_path, monkeypatch, to, workers
    ):
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

    def test_memory_is_given_back_before_the_disk_is_waited_for(self):
        """With room for one part, the second is written while the first waits for the disk."""
        second, committed = threading.Event(), []

        def write(part):
            if part.name == "1":
                second.set()
            return part.name

        def commit(names):
            assert second.wait(PATIENCE), "the second part waits for the first one's disk"
            committed.extend(names)

        with Committer(commit, lambda: None) as committer:
            run_parts(parts(1, 1), write, MemoryBudget(1), 2, committer.submit)
        assert committed == ["0", "1"]

    def test_what_was_written_meanwhile_is_committed_together(self):
        written, batches = threading.Semaphore(0), []

        def submit(name):
            committer.submit(name)
            written.release()

        def commit(names):
            if not batches:
                for _ in range(4):
                    assert written.acquire(timeout=PATIENCE)
            batches.append(sorted(names))

        with Committer(commit, lambda: None) as committer:
            run_parts(parts(1, 1, 1, 1), name_of, MemoryBudget(9), 4, submit)
        assert sorted(name for batch in batches for name in batch) == ["0", "1", "2", "3"]
        assert len(batches) <= 2

    @pytest.mark.parametrize("beside", [True, False])
    def test_a_failure_stops_the_writing(self, beside):
        budget, written = MemoryBudget(1), []

        def write(part):
            written.append(part.name)
            return part.name

        def commit(names):
            raise OSError(28, "No space left on device")

        committer = Committer(commit, budget.stop, beside)
        with pytest.raises(OSError, match="No space left"), committer:
            run_parts(parts(1, 1), write, budget, 1, committer.submit)
            # Whoever comes after the failure does not begin.
            committer._thread.join(PATIENCE)
            run_parts(parts(*[1] * 50), write, budget, 1)
        assert len(written) < 50
        with pytest.raises(StoppedError):
            budget.check()

    def test_the_first_error_is_the_one_that_is_raised(self):
        def commit(names):
            raise OSError("the disk")

        failed = threading.Event()
        committer = Committer(commit, failed.set)
        with pytest.raises(ValueError, match="the part"), committer:
            committer.submit("a")
            assert failed.wait(PATIENCE)
            raise ValueError("the part")


class TestFileErrors:
    @pytest.mark.parametrize(("place", "named"), [([], "part 3"), (["/a/file"], "/a/file")])
    def test_place_is_added_where_there_is_none(self, place, named):
        with pytest.raises(OSError) as caught, file_errors("part 3"):
            raise OSError(28, "No space left on device", *place)
        assert caught.value.filename == named

    def test_full_disk_under_torch_save(self):
        """Into a file of its own, torch does not say why it failed."""
        values = {"x": torch.ones(100_000)}
        with open("/dev/full", "wb", buffering=0) as full:
            for place, why in (("/dev/full", "disk may be full"), (full, "No space left")):
                with pytest.raises(OSError, match=why) as caught, file_errors("part 3"):
                    torch.save(values, place)
                assert caught.value.filename == "part 3"

    def test_other_errors_stay(self):
        with pytest.raises(RuntimeError, match="shape"), file_errors("part 3"):
            raise RuntimeError("shape")
