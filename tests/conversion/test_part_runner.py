"""Threads within a bound on memory, stopped by the first error."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from checkpoint_conversion.formats.base import Part
from checkpoint_conversion.part_runner import (
    MemoryBudget,
    StoppedError,
    file_errors,
    run_parts,
)


def parts(*peaks: int) -> list[Part]:
    return [Part(str(i), (), peak) for i, peak in enumerate(peaks)]


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


def test_all_run_within_the_bound():
    watch = Watch(patience=2)
    run_parts(parts(*([3, 1, 2] * 8)), watch.write, MemoryBudget(5), workers=4)
    assert sorted(watch.done, key=int) == [str(i) for i in range(24)]
    assert watch.most_memory <= 5
    assert watch.most_running > 1


def test_one_that_needs_more_than_the_bound_runs_alone():
    watch = Watch()
    run_parts(parts(1, 9, 1, 9, 1), watch.write, MemoryBudget(5), workers=4)
    assert len(watch.done) == 5
    assert watch.most_memory == 9


def test_first_error_stops_those_that_run_and_those_that_wait():
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
    # The one that ran, and perhaps one that got the memory of the one that failed: which one, and
    # whether, depends on how soon the failure is noticed.
    assert "1" in stopped and len(stopped) <= 2


def test_memory_is_given_back_after_an_error():
    budget = MemoryBudget(1)
    with pytest.raises(KeyError), budget.reserve(1):
        raise KeyError
    with budget.reserve(1):
        pass


class TestFileErrors:
    def test_place_is_added_where_there_is_none(self):
        with pytest.raises(OSError) as caught, file_errors("part 3"):
            raise OSError(28, "No space left on device")
        assert caught.value.filename == "part 3"
        with pytest.raises(OSError) as caught, file_errors("part 3"):
            raise OSError(28, "No space left on device", "/a/file")
        assert caught.value.filename == "/a/file"

    def test_full_disk_under_torch_save(self):
        """Into a file of its own, torch does not say why it failed."""
        values = {"x": torch.ones(100_000)}
        with pytest.raises(OSError, match="disk may be full") as caught, file_errors("part 3"):
            torch.save(values, "/dev/full")
        assert caught.value.filename == "part 3"
        with (
            open("/dev/full", "wb", buffering=0) as full,
            pytest.raises(OSError, match="No space left") as caught,
            file_errors("part 3"),
        ):
            torch.save(values, full)
        assert caught.value.filename == "part 3"

    def test_other_errors_stay(self):
        with pytest.raises(RuntimeError, match="shape"), file_errors("part 3"):
            raise RuntimeError("shape")
