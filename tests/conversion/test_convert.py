"""A conversion from plan to target, and what survives its interruption."""

import errno
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from checkpoint_conversion import checkpoint_folder, planning
from checkpoint_conversion import convert as module
from checkpoint_conversion.convert import convert
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.base import TargetOptions
from checkpoint_conversion.manifest import find_manifest, read_manifest
from checkpoint_conversion.progress import Reporter
from tests.conversion.fake_format import MemoryCheckpoint, RawWriter
from tests.conversion.support import random_tensors, tensor_checksum, tiny_config


class Recorder(Reporter):
    def __init__(self) -> None:
        self.total = self.done = 0
        self.said: list[str] = []

    def start(self, total, done):
        self.total, self.done = total, done

    def advance(self, nbytes):
        self.done += nbytes

    def say(self, text):
        self.said.append(text)


class Setting:
    """One source, the writer of the next conversion, and the target."""

    def __init__(self, folder: Path) -> None:
        self.source, self.target = folder / "source", folder / "out"
        self.source.mkdir()
        (self.source / "weights").write_text("not read")
        self.config = tiny_config()
        self.tensors = random_tensors(self.config)
        self.before = lambda name: None
        self.writer: RawWriter
        self.reporter = Recorder()

    def open(self, path) -> MemoryCheckpoint:
        return MemoryCheckpoint(path, self.config, self.tensors)

    def writer_for(self, to, config, options) -> RawWriter:
        self.writer = RawWriter(config, options)
        self.writer.before = self.before
        return self.writer

    def beside(self) -> list[str]:
        """What is in the folder of source and target."""
        return sorted(path.name for path in self.source.parent.iterdir())

    def convert(self, **how):
        self.reporter = Recorder()
        return convert(self.source, self.target, "raw", reporter=self.reporter, **how)

    def interrupt(
        self, after: int, error: BaseException | None = None, done_before: int = 0, **how
    ) -> None:
        """Run until ``after`` more parts are done, one at a time."""
        error = error or OSError(errno.ENOSPC, "No space left on device")

        def fail(name):
            if len(self.writer.written) == after:
                raise error

        self.before = fail
        with pytest.raises(type(error)) as caught:
            self.convert(workers=1, **how)
        (note,) = caught.value.__notes__
        assert f"{done_before + after} of " in note and "--resume" in note
        self.before = lambda name: None
        assert not self.target.exists()
        assert len(self.writer.written) == after


@pytest.fixture
def setting(tmp_path, monkeypatch) -> Setting:
    setting = Setting(tmp_path)
    monkeypatch.setattr(module, "open_checkpoint", setting.open)
    kind_of = lambda path: "fake" if (path / "weights").exists() else None  # noqa: E731
    monkeypatch.setattr(checkpoint_folder, "kind_of", kind_of)
    monkeypatch.setattr(planning, "writer_for", setting.writer_for)
    return setting


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


class TestWhole:
    def test_everything_is_written_once(self, setting):
        report = setting.convert(workers=3)
        assert sorted(setting.writer.written) == [part.name for part in report.plan.parts]
        assert setting.beside() == ["out", "source"]
        assert setting.reporter.done == setting.reporter.total == report.plan.nbytes
        assert report.bytes_written == report.plan.nbytes
        assert report.resumed_parts == 0
        assert report.seconds > 0
        assert report.peak_rss > 1 << 20

    def test_manifest_has_a_checksum_of_every_tensor(self, setting):
        setting.convert()
        manifest = read_manifest(find_manifest(setting.target))
        assert {record.key: record.checksum for record in manifest.tensors} == {
            name: tensor_checksum(tensor) for name, tensor in setting.tensors.items()
        }
        layout = {"kept": "in memory"}
        assert manifest.source == {"format": "memory", "layout": layout, "folder": "source"}
        assert str(setting.source.parent) not in find_manifest(setting.target).read_text()

    def test_error_in_the_plan_leaves_nothing_behind(self, setting, monkeypatch):
        setting.target = setting.target / "new" / "folders"
        planned = RawWriter.plan
        monkeypatch.setattr(RawWriter, "plan", lambda *args: planned(*args) * 2)
        with pytest.raises(CheckpointError, match="twice"):
            setting.convert()
        assert setting.beside() == ["source"]


def test_source_that_changes_meanwhile(setting):
    """The training went on and overwrote it: parts of two models make none."""

    def change(name):
        if name == "part-003":
            (setting.source / "weights").write_text("trained further")

    setting.before = change
    with pytest.raises(CheckpointError, match="changed while") as caught:
        setting.convert()
    assert "weights" in caught.value.problems[0]
    assert not setting.target.exists()


class TestTarget:
    def test_existing_is_refused_before_the_source_is_read(self, setting, monkeypatch):
        setting.target.mkdir()
        monkeypatch.setattr(module, "open_checkpoint", None)
        with pytest.raises(CheckpointError, match="--force"):
            setting.convert()

    def test_not_enough_space_is_said_before_anything_is_written(self, setting, monkeypatch):
        usage = shutil._ntuple_diskusage(10**9, 10**9, 1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(OSError, match=r"needs .* kB, but the disk has only 1.0 kB") as caught:
            setting.convert()
        assert caught.value.errno == errno.ENOSPC
        assert setting.writer.written == []
        assert setting.beside() == ["source"]


class TestInterrupted:
    @pytest.fixture
    def whole(self, setting) -> dict[str, bytes]:
        """What an uninterrupted conversion writes."""
        setting.convert()
        found = contents(setting.target)
        shutil.rmtree(setting.target)
        return found

    @pytest.mark.parametrize("after", [1, 4])
    def test_resumed_is_the_same_as_uninterrupted(self, setting, whole, after):
        setting.interrupt(after)
        report = setting.convert(resume=True)
        assert contents(setting.target) == whole
        assert report.resumed_parts == after
        assert len(setting.writer.written) == len(report.plan.parts) - after
        assert setting.reporter.done == setting.reporter.total

    def test_nothing_stays_if_nothing_was_finished(self, setting):
        def fail(name):
            raise OSError(errno.EIO, "broken disk")

        setting.before = fail
        with pytest.raises(OSError, match="broken") as caught:
            setting.convert()
        assert not hasattr(caught.value, "__notes__")
        assert setting.beside() == ["source"]

    def test_twice(self, setting):
        setting.interrupt(2)
        setting.interrupt(1, done_before=2, resume=True)
        assert setting.convert(resume=True).resumed_parts == 3

    def test_without_resume_it_starts_anew(self, setting):
        setting.interrupt(2)
        report = setting.convert()
        assert report.resumed_parts == 0
        assert "removed" in setting.reporter.said[0]

    def test_resume_without_anything_to_resume(self, setting):
        assert setting.convert(resume=True).resumed_parts == 0
        assert "nothing to resume" in setting.reporter.said[0]

    @pytest.mark.parametrize("option", [{"dtype": torch.float16}, {"iteration": 3}])
    def test_other_options_are_refused(self, setting, option):
        setting.interrupt(2)
        with pytest.raises(CheckpointError, match="option"):
            setting.convert(resume=True, options=TargetOptions(**option))
        assert setting.convert(resume=True).resumed_parts == 2

    def test_changed_source_is_refused(self, setting):
        setting.interrupt(2)
        (setting.source / "weights").write_text("trained further")
        with pytest.raises(CheckpointError, match="source file: weights"):
            setting.convert(resume=True)

    def test_damaged_part_is_written_again(self, setting, whole):
        setting.interrupt(3)
        work = setting.target.parent / ".out.converting" / "checkpoint"
        (work / "weights" / "part-001.bin").write_bytes(b"short")
        (work / "weights" / "part-999.bin").write_bytes(b"half of a part")
        setting.convert(resume=True)
        assert contents(setting.target) == whole
        assert "part-001 is not as it was" in setting.reporter.said[0]

    def test_complete_target_needs_nothing(self, setting):
        """Whoever was killed at the very end cannot know that there was nothing left to do."""
        setting.convert()
        report = setting.convert(resume=True)
        assert setting.writer.written == []
        assert report.resumed_parts == len(report.plan.parts)
        assert report.bytes_written == 0
        assert "complete already" in setting.reporter.said[0]
        assert setting.beside() == ["out", "source"]

    @pytest.mark.parametrize("change", ["option", "source", "manifest", "file"])
    def test_target_of_another_conversion_is_refused(self, setting, change):
        setting.convert()
        options = TargetOptions(iteration=3 if change == "option" else None)
        if change == "source":
            (setting.source / "weights").write_text("trained further")
        if change == "manifest":
            find_manifest(setting.target).unlink()
        if change == "file":
            (setting.target / "weights" / "part-001.bin").write_bytes(b"short")
        with pytest.raises(CheckpointError, match="--force"):
            setting.convert(resume=True, options=options)


def test_worker_that_fails_stops_the_others(setting):
    both = threading.Barrier(2, timeout=10)

    def fail(name):
        if name in ("part-000", "part-001"):
            both.wait()
        if name == "part-000":
            raise ValueError("damaged")
        # Long enough for the other thread to fail, on a busy machine too.
        time.sleep(0.5)

    setting.before = fail
    with pytest.raises(ValueError, match="damaged"):
        setting.convert(workers=2)
    assert len(setting.writer.written) <= 1
