"""What an interrupted conversion recorded, and when it is not believed."""

import json
import os
import resource

import pytest
import torch

from checkpoint_conversion.formats.base import PartResult
from checkpoint_conversion.journal import Journal
from checkpoint_conversion.manifest import tensor_record
from checkpoint_conversion.planning import source_files
from tests.conversion.support import refused

FINGERPRINT = {"format": "hf", "source file": {"a": [1, 2]}, "option": {"dtype": None}}
RESULTS = [
    PartResult(
        f"part-{i}",
        {f"file-{i}": 4},
        [tensor_record(f"k{i}", torch.full((2,), i), f"file-{i}", (4,))],
        {"anything": [i]},
    )
    for i in range(3)
]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "journal"
    journal = Journal.create(path, FINGERPRINT)
    for result in RESULTS:
        journal.add(result)
    journal.close()
    return path


def resumed(path) -> list[PartResult]:
    journal = Journal.resume(path, FINGERPRINT)
    assert journal is not None
    journal.close()
    return list(journal.results.values())


def test_results_come_back(path):
    assert resumed(path) == RESULTS


def test_cut_at_every_byte(path):
    """Whatever a kill leaves of the last line, complete lines count, and writing can go on."""
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        complete = data[:length].count(b"\n")
        journal = Journal.resume(path, FINGERPRINT)
        if not complete:
            assert journal is None
            continue
        assert list(journal.results.values()) == RESULTS[: complete - 1]
        journal.add(RESULTS[2])
        journal.close()
        assert resumed(path)[-1] == RESULTS[2]


def test_nothing_to_resume(tmp_path):
    assert Journal.resume(tmp_path / "absent", FINGERPRINT) is None


def test_another_conversion_is_refused_saying_what_differs(path):
    other = {"format": "hf", "source file": {"a": [1, 3], "b": [1, 1]}, "option": {"dtype": "x"}}
    changed = ('dtype was null, is "x"', "a was [1, 2], is [1, 3]", "b was null, is [1, 1]")
    with refused("without --resume", *changed, "option: ", "source file: ", problems=3):
        Journal.resume(path, other)


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"part": {}}',
        b'{"part": {"name": "x", "files": {"f": "4"}, "tensors": [], "storage": {}}}',
        b'{"part": {"name": 1, "files": {}, "tensors": [], "storage": {}}}',
        b'{"part": {"name": "x", "files": {}, "tensors": [{"key": 1}], "storage": {}}}',
    ],
)
def test_damaged_lines_are_refused(path, line):
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:2], line, *lines[2:], b""]))
    with refused("without --resume"):
        Journal.resume(path, FINGERPRINT)


def test_parts_whose_files_changed_are_dropped(path, tmp_path):
    for i, text in enumerate(("good", "bad")):
        (tmp_path / f"file-{i}").write_text(text)
    journal = Journal.resume(path, FINGERPRINT)
    assert journal.drop_damaged(tmp_path) == ["part-1", "part-2"]
    assert list(journal.results) == ["part-0"]
    journal.close()


def test_each_line_is_on_disk_before_the_next_thing_happens(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.read_bytes()))
    journal = Journal.create(path, FINGERPRINT)
    journal.add(RESULTS[0])
    assert [text.count(b"\n") for text in synced] == [1, 2]
    assert json.loads(synced[-1].splitlines()[-1])["part"]["name"] == "part-0"
    journal.close()


def test_line_that_does_not_fit_onto_the_disk_is_taken_back(path):
    """Another thread's part may still fit, because it is shorter."""
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    journal = Journal.resume(path, FINGERPRINT)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 150, limits[1]))
    try:
        for _ in range(2):
            with pytest.raises(OSError, match="too large"):
                journal.add(PartResult("long", {"file": 1}, [], {"x": "x" * 200}))
            assert path.read_bytes() == before
        journal.add(PartResult("short", {"file": 1}, []))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        journal.close()
    assert [result.name for result in resumed(path)] == ["part-0", "part-1", "part-2", "short"]


def test_source_files_notice_changes(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a").write_text("a")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = source_files(tmp_path)
    assert list(before) == ["inner/a"]
    os.utime(tmp_path / "inner" / "a", ns=(0, 5))
    assert source_files(tmp_path) == {"inner/a": [1, 5]} != before
