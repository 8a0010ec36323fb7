"""scripts/benchmarks/conversion.py: it measures what it says, and notices a missed bound."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import conversion
from benchmarks.conversion import ConversionBenchmark, ConversionReport, Row, describe, filesystem
from benchmarks.kit import command
from benchmarks.kit.command import CommandError, Run, forget, measure

SCRIPTS = Path(conversion.__file__).parents[1]
MB = 10**6
ALLOCATE = "x = b'1' * {size}; import time; time.sleep(0.4)"
ROW = Row(
    path="hf → megatron",
    model="a model",
    source_bytes=5000 * MB,
    target_bytes=5001 * MB,
    largest_tensor=200 * MB,
    keeps_dtypes=True,
    cp_seconds=(10.0, 14.0),
    tool_seconds=(19.0, 21.0),
    peak_bytes=1100 * MB,
    anonymous_bytes=300 * MB,
)


@pytest.fixture
def folders(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "a").write_bytes(os.urandom(3 * MB))
    return source, target, tmp_path / "log"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def measured(words: list[str], folders: tuple[Path, Path, Path]) -> Run:
    """By a small process: one that is started begins with its parent's high-water mark."""
    code = (
        "import sys, pathlib; from benchmarks.kit.command import measure\n"
        "print(measure(sys.argv[4:], *map(pathlib.Path, sys.argv[1:4])))"
    )
    done = subprocess.run(
        [*python(code), *map(str, folders), *words],
        env={**os.environ, "PYTHONPATH": str(SCRIPTS)},
        capture_output=True,
        text=True,
        check=True,
    )
    values = dict(re.findall(r"(\w+)=([0-9.]+)", done.stdout))
    return Run(*(float(values[field.name]) for field in dataclasses.fields(Run)))


ONE = ALLOCATE.format(size=300 * MB)
CHILD = python(ALLOCATE.format(size=200 * MB))


@pytest.mark.parametrize(
    ("code", "least", "most"),
    [
        (ONE, 300, 350),
        # All processes count.
        (f"import subprocess; x = b'1' * {200 * MB}; subprocess.run({CHILD!r})", 400, 460),
        # It lasts for less than a sample takes.
        (f"x = b'1' * {300 * MB}; del x", 300, 350),
    ],
    ids=["one process", "and its child", "for a moment"],
)
def test_peak_memory(folders, code, least, most):
    run = measured(python(code), folders)
    assert least * MB < run.peak_bytes < most * MB
    assert run.anonymous_bytes <= run.peak_bytes
    if code == ONE:
        assert run.anonymous_bytes > 300 * MB


def test_memory_is_never_nothing(folders, monkeypatch):
    """Of a process that ends before it is looked at, by one that is larger."""

    def status(pid, *keys):
        return [10**15] if keys == ("VmHWM",) else [0, 0]

    monkeypatch.setattr("benchmarks.kit.command._status", status)
    assert measure(["true"], *folders).peak_bytes > MB


def test_mapped_pages_are_told_apart(folders):
    code = (
        "import mmap, sys, time; f = open(sys.argv[1], 'rb')\n"
        "m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ); sum(m[::4096]); time.sleep(0.4)"
    )
    (folders[0] / "a").write_bytes(bytes(100 * MB))
    run = measured([*python(code), str(folders[0] / "a")], folders)
    assert run.peak_bytes > 100 * MB > 50 * MB > run.anonymous_bytes


def test_the_time_ends_when_everything_is_on_disk(folders, monkeypatch):
    """By a clock that only moves while somebody waits: the command, and the target's disk count."""
    source, target, log = folders
    clock, wait = [100], command._wait

    def waiting(process):
        clock[0] += 4
        return wait(process)

    def syncing(path):
        clock[0] += {source: 1, target: 2}[path]

    monkeypatch.setattr(command, "_wait", waiting)
    monkeypatch.setattr(command, "sync", syncing)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert measure(["true"], source, target, log).seconds == 4 + 2
    assert clock == [100 + 1 + 4 + 2]


def test_a_failure_shows_the_output(folders):
    with pytest.raises(CommandError, match=r"(?s)ended with 3.*the reason"):
        measure(python("print('the reason'); raise SystemExit(3)"), *folders)


def test_forget_drops_the_page_cache(folders):
    file = folders[0] / "a"
    file.read_bytes()
    if filesystem(file.parent) in ("tmpfs", "ramfs", "overlay"):
        pytest.skip("this file system keeps its pages, or another one's")
    assert _cached(file) >= file.stat().st_size
    forget(folders[0])
    assert _cached(file) == 0


def _cached(file: Path) -> int:
    try:
        words = ["fincore", "--bytes", "--noheadings", "--output", "RES", str(file)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        pytest.skip("fincore of util-linux is not there")
    return int(done.stdout)


def test_bounds():
    assert ROW.ratio == 0.6
    assert ROW.memory_bound == 1100 * MB
    assert not ROW.missed()
    slow = dataclasses.replace(ROW, tool_seconds=(20.0, 21.0))
    large = dataclasses.replace(ROW, peak_bytes=1100 * MB + 1)
    assert "0.59 of cp's throughput" in slow.missed()[0]
    assert "resident" in large.missed()[0]
    assert not dataclasses.replace(slow, keeps_dtypes=False).missed()
    assert not dataclasses.replace(slow, source_bytes=3900 * MB).missed()
    assert dataclasses.replace(large, keeps_dtypes=False).missed()


def test_report(tmp_path):
    larger = dataclasses.replace(ROW, source_bytes=20_000 * MB, peak_bytes=1200 * MB)
    found = ConversionReport(describe(tmp_path), [larger, ROW])
    found.write(tmp_path / "a.json")
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["rows"][0]["missed"] and not content["rows"][1]["missed"]
    assert content["machine"]["cores"] > 0 and content["machine"]["versions"]["torch"] != "unknown"
    text = "\n".join(ConversionReport.notes([found]))
    assert "missed: hf → megatron at 20.00 GB: 1200 MB resident, at most 1100 MB" in text


# Long enough for a sample.
COPY = "import shutil, sys, time; shutil.copytree(*sys.argv[2:4]); time.sleep(0.5)"


def test_the_whole_measurement(tmp_path, monkeypatch, capfd):
    """With a tool that copies, at a size where only memory has a bound."""
    monkeypatch.setattr(conversion, "TOOL", python(COPY))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    options = ["--sizes", "3MB", "--repeat", "1", "--work-folder", str(work)]
    assert ConversionBenchmark.main([str(out), *options]) == 0
    rows = json.loads((out / "benchmark.json").read_text())["rows"]
    sources = ["hf", "hf", "megatron", "hf (FP8)"]
    assert [row["path"].split(" → ")[0] for row in rows] == sources
    for row in rows:
        assert len(row["cp_seconds"]) == len(row["tool_seconds"]) == 1
        assert row["source_bytes"] == row["target_bytes"] > 2 * MB
        assert 5 * MB < row["peak_bytes"] < 100 * MB
    assert rows[-1]["source_bytes"] < rows[0]["source_bytes"]
    assert not list(work.iterdir())
    assert "hf (FP8) → megatron" in capfd.readouterr().out


def test_a_tool_that_fails(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(conversion, "TOOL", python("raise SystemExit('the reason')"))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    options = ["--sizes", "3MB", "--repeat", "1", "--work-folder", str(tmp_path)]
    assert ConversionBenchmark.main([str(tmp_path / "out"), *options]) == 1
    assert "the reason" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_missed_bound_is_the_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", "")
    bench = ConversionBenchmark(ConversionBenchmark.parse([str(tmp_path), "--sizes", "3MB"]))
    slow = dataclasses.replace(ROW, tool_seconds=(20.0, 21.0))
    assert bench.exit_code(ConversionReport({}, [ROW, slow])) == 1
    assert capsys.readouterr().err.startswith("missed: hf → megatron at 5.00 GB: 0.59 of cp's")
    assert bench.exit_code(ConversionReport({}, [ROW])) == 0
