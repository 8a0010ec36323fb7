"""A target is absent or complete, and nothing but a checkpoint is ever replaced."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from checkpoint_conversion.target_folder import TargetFolder, check_places
from tests.conversion.support import refused


def weights_of(folder: Path) -> Path | None:
    return folder if (folder / "weights").exists() else None


def target(path: Path, force: bool = False) -> TargetFolder:
    return TargetFolder(path, force, weights_of)


def make_checkpoint(path: Path, text: str) -> None:
    path.mkdir(parents=True)
    (path / "weights").write_text(text)


def write(folder: TargetFolder, text: str) -> None:
    folder.start()
    (folder.contents / "weights").write_text(text)


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


class TestPublish:
    def test_target_appears_at_once_and_nothing_stays_beside_it(self, tmp_path):
        path = tmp_path / "new" / "parents" / "out"
        with target(path) as folder:
            write(folder, "new")
            folder.journal.write_text("journal")
            assert not path.exists()
            folder.publish()
        assert names(path) == ["weights"]
        assert names(path.parent) == ["out"]

    def test_replaces_a_checkpoint_with_force(self, tmp_path):
        make_checkpoint(tmp_path / "out", "old")
        with target(tmp_path / "out", force=True) as folder:
            write(folder, "new")
            assert (tmp_path / "out" / "weights").read_text() == "old"
            folder.publish()
            folder.remove_replaced()
        assert (tmp_path / "out" / "weights").read_text() == "new"
        assert names(tmp_path) == ["out"]

    def test_a_target_that_appeared_meanwhile_is_not_replaced(self, tmp_path):
        with target(tmp_path / "out") as folder:
            write(folder, "new")
            make_checkpoint(tmp_path / "out", "somebody else's")
            with refused("exists"):
                folder.publish()
        assert (tmp_path / "out" / "weights").read_text() == "somebody else's"

    def test_old_target_returns_if_the_new_one_cannot_be_moved(self, tmp_path, monkeypatch):
        make_checkpoint(tmp_path / "out", "old")
        rename = Path.rename

        def failing(path, to):
            if path.name == "checkpoint":
                raise OSError(errno.EDQUOT, "quota")
            return rename(path, to)

        with target(tmp_path / "out", force=True) as folder:
            write(folder, "new")
            monkeypatch.setattr(Path, "rename", failing)
            with pytest.raises(OSError, match="quota"):
                folder.publish()
        assert (tmp_path / "out" / "weights").read_text() == "old"

    def test_everything_is_synced_before_the_rename(self, tmp_path, monkeypatch):
        events = []
        fsync, rename = os.fsync, Path.rename

        def recorded_fsync(descriptor):
            events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            fsync(descriptor)

        def recorded_rename(path, to):
            events.append("rename")
            return rename(path, to)

        with target(tmp_path / "out") as folder:
            write(folder, "new")
            (folder.contents / "inner").mkdir()
            (folder.contents / "inner" / "file").touch()
            contents = folder.contents.resolve()
            monkeypatch.setattr(os, "fsync", recorded_fsync)
            monkeypatch.setattr(Path, "rename", recorded_rename)
            folder.publish()
        before = events[: events.index("rename")]
        expected = {contents, contents / "weights", contents / "inner", contents / "inner/file"}
        assert set(map(str, expected)) <= set(before)
        assert str(tmp_path.resolve()) in events[len(before) :]


class TestExistingTarget:
    @pytest.mark.parametrize(
        ("inside", "force", "why"),
        [
            (["weights"], False, "--force"),
            ([], False, "--force"),
            (["thesis.tex"], True, "is no checkpoint"),
            # A home folder with one stray file of weights looks like a checkpoint, too.
            (["weights", "iter_0000100/"], True, "iter_0000100"),
            (["weights", "Documents/"], True, "Documents"),
            (["weights", ".git/"], True, ".git"),
        ],
    )
    def test_is_not_replaced(self, tmp_path, inside, force, why):
        """What is no checkpoint, or no part of one, never; others with force only."""
        (tmp_path / "out").mkdir()
        for name in inside:
            place = tmp_path / "out" / name
            place.mkdir() if name.endswith("/") else place.touch()
        with target(tmp_path / "out", force) as folder, refused(why):
            folder.refuse_existing()
        assert names(tmp_path) == ["out"]

    def test_empty_folder_is_replaced_with_force(self, tmp_path):
        (tmp_path / "out").mkdir()
        with target(tmp_path / "out", force=True) as folder:
            folder.refuse_existing()

    def test_weights_may_be_in_a_folder_of_their_own(self, tmp_path):
        path = tmp_path / "out"
        make_checkpoint(path / "release", "old")
        with TargetFolder(path, True, lambda path: path / "release") as folder:
            folder.refuse_existing()
            (path / "logs").mkdir()
            with refused("logs"):
                folder.refuse_existing()


class TestPlaces:
    @pytest.mark.parametrize(
        ("source", "to", "why"),
        [
            (".", ".", "same folder"),
            ("here", ".", "same folder"),
            (".", "out", "inside the source"),
            (".", "deep/out", "inside the source"),
            (".", "deep/../out", "inside the source"),
            ("a/source", "a", "inside the target"),
            ("source", "file", "is a file"),
            ("source", "link", "is a link"),
        ],
    )
    def test_refused(self, tmp_path, source, to, why):
        (tmp_path / "file").touch()
        (tmp_path / "here").symlink_to(tmp_path)
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        with refused(why):
            check_places(tmp_path / source, tmp_path / to)

    def test_neighbours_whose_names_begin_alike(self, tmp_path):
        check_places(tmp_path / "model", tmp_path / "model-converted")

    def test_working_folder_that_is_a_link(self, tmp_path):
        """Otherwise whoever made it decides where the bytes go."""
        (tmp_path / ".out.converting").symlink_to(tmp_path / "elsewhere")
        with refused("in the way"), target(tmp_path / "out"):
            pass


class TestLock:
    def test_second_conversion_of_a_target_is_refused(self, tmp_path):
        with target(tmp_path / "out") as first:
            write(first, "new")
            with refused("another conversion"), target(first.path):
                pass
            first.publish()
        assert names(tmp_path) == ["out"]

    def test_other_targets_are_free(self, tmp_path):
        with target(tmp_path / "a") as a, target(tmp_path / "b") as b:
            write(a, "a")
            write(b, "b")
            a.publish()
            b.publish()
        assert names(tmp_path) == ["a", "b"]

    def test_lock_file_that_its_owner_removed_is_not_trusted(self, tmp_path, monkeypatch):
        """The owner ends between our opening of the file and our locking it."""
        first = target(tmp_path / "out")
        first.__enter__()
        flock, calls = fcntl.flock, []

        def late(descriptor, operation):
            calls.append(operation)
            if len(calls) == 1:
                first.__exit__()
            flock(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", late)
        with target(tmp_path / "out"):
            assert len(calls) == 2
            assert (tmp_path / ".out.converting" / "lock").exists()

    def test_released_if_the_recovery_fails(self, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(TargetFolder, "_recover", lambda folder: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                target(tmp_path / "out").__enter__()
        with target(tmp_path / "out"):
            pass


class TestInterrupted:
    def test_contents_and_journal_stay(self, tmp_path):
        with pytest.raises(RuntimeError), target(tmp_path / "out") as folder:
            write(folder, "half")
            folder.journal.write_text("journal")
            raise RuntimeError
        with target(tmp_path / "out") as folder:
            assert (folder.contents / "weights").read_text() == "half"
            assert folder.journal.exists()
            assert folder.start()
            assert names(folder.contents) == []
            assert not folder.journal.exists()

    @pytest.mark.parametrize("found", ["old", "new"])
    def test_killed_between_the_renames_and_after(self, tmp_path, found):
        make_checkpoint(tmp_path / ".out.replaced", "old")
        if found == "new":
            make_checkpoint(tmp_path / "out", "new")
            (tmp_path / ".out.converting").mkdir()
            (tmp_path / ".out.converting" / "journal").touch()
        with target(tmp_path / "out"):
            assert (tmp_path / "out" / "weights").read_text() == found
        assert names(tmp_path) == ["out"]

    def test_files_that_no_part_recorded_are_removed(self, tmp_path):
        with target(tmp_path / "out") as folder:
            folder.start()
            for name in ("whole/a", "half/b", "c", "d"):
                path = folder.contents / name
                path.parent.mkdir(exist_ok=True)
                path.touch()
            (folder.contents / "link").symlink_to(tmp_path)
            folder.keep_only({"whole/a", "d"})
            found = folder.contents.rglob("*")
            left = sorted(path.relative_to(folder.contents).as_posix() for path in found)
        assert left == ["d", "whole", "whole/a"]
        assert tmp_path.exists()
