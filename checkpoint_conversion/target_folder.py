"""The folder that a conversion writes: absent or complete whenever the conversion is interrupted.

    PARENT/TARGET                          the result
    PARENT/.TARGET.converting/checkpoint/  being written, or what an interrupted conversion left
    PARENT/.TARGET.converting/journal      what is finished in there
    PARENT/.TARGET.converting/lock         locked by the process that writes
    PARENT/.TARGET.replaced/               the old target, while the new one takes its place

The target gets its name in one rename, after all its bytes are on disk. An old target is moved
away just before; a conversion killed between the two renames leaves it to the next start, which
moves it back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from checkpoint_conversion.errors import CheckpointError


def check_places(source: Path, target: Path) -> None:
    """Refuse a target that is, holds or lies in the source, or cannot be a folder of its own.

    Raises:
        CheckpointError: Saying what is wrong.
    """
    if target.is_symlink():
        raise CheckpointError(f"the target {target} is a link; give the folder it points to")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"the target {target} is a file; a checkpoint is a folder")
    here, there = source.resolve(), target.resolve()
    if here == there or (source.exists() and target.exists() and source.samefile(target)):
        raise CheckpointError(f"source and target are the same folder, {source}")
    if here in there.parents:
        raise CheckpointError(f"the target {target} lies inside the source {source}")
    if there in here.parents:
        raise CheckpointError(f"the source {source} lies inside the target {target}")


WeightsOf = Callable[[Path], Path | None]


class TargetFolder:
    """One conversion's hold on its target; a context manager that locks and unlocks.

    Leaving the context keeps what is unfinished, for a later ``--resume``.

    Args:
        path: The target.
        force: Whether an empty folder or a checkpoint in its place may be replaced.
        weights_of: The folder with the weights of a checkpoint, None for what is no checkpoint.

    Attributes:
        contents: Where the checkpoint is written; exists after :meth:`start`.
        journal: Path of the journal.
    """

    def __init__(self, path: Path, force: bool, weights_of: WeightsOf) -> None:
        self._existing = force, weights_of
        self.path = path.absolute()
        if not self.path.name:
            raise CheckpointError(f"{path} cannot be a target")
        self._work = self.path.parent / f".{self.path.name}.converting"
        self._replaced = self.path.parent / f".{self.path.name}.replaced"
        self.contents = self._work / "checkpoint"
        self.journal = self._work / "journal"
        self._lock_file = self._work / "lock"
        self._descriptor: int | None = None

    def __enter__(self) -> TargetFolder:
        if self._work.is_symlink() or (self._work.exists() and not self._work.is_dir()):
            raise CheckpointError(f"{self._work} is in the way; it must be a folder, or absent")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock()
        try:
            self._recover()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlock, and remove what is of no use to a later start; again after an interruption."""
        if self._descriptor is None:
            return
        if not self.contents.exists():
            self.journal.unlink(missing_ok=True)
            # Whoever waits for this lock file sees that it is gone, and makes a new one.
            self._lock_file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._work.rmdir()
        descriptor, self._descriptor = self._descriptor, None
        os.close(descriptor)

    def refuse_existing(self) -> None:
        """Refuse a target that exists and may not be replaced; see :func:`refuse_existing`."""
        refuse_existing(self.path, *self._existing)

    def start(self) -> bool:
        """Make an empty folder for the contents.

        Returns:
            Whether the leftovers of an interrupted conversion were removed.
        """
        found = self.contents.exists() or self.journal.exists()
        # The journal first: contents without one are never trusted.
        self.journal.unlink(missing_ok=True)
        if self.contents.exists():
            shutil.rmtree(self.contents)
        self.contents.mkdir()
        sync_path(self._work)
        return found

    def discard(self) -> None:
        """Remove contents that nothing can be resumed from."""
        if self.contents.exists():
            shutil.rmtree(self.contents)

    def keep_only(self, files: set[str]) -> None:
        """Remove all other files: an interrupted part may have left half a file."""
        for path in sorted(self.contents.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path.relative_to(self.contents).as_posix() not in files:
                path.unlink()

    def sync_files(self, files: Iterable[str]) -> None:
        """Wait until files, relative to the contents, and their names are on disk."""
        paths = [self.contents / file for file in files]
        for path in paths:
            sync_path(path)
        for folder in {folder for path in paths for folder in path.parents}:
            if folder.is_relative_to(self.contents):
                sync_path(folder)

    def publish(self, synced: Iterable[str] = ()) -> None:
        """Bring all but the ``synced`` files to the disk and give the target its name."""
        sync_tree(self.contents, {self.contents / file for file in synced})
        self.refuse_existing()
        try:
            if self.path.exists():
                self.path.rename(self._replaced)
            self.contents.rename(self.path)
        except BaseException:
            # Also after Ctrl-C: the old target is where it was, or its successor is.
            self._recover()
            raise
        sync_path(self.path.parent)

    def remove_replaced(self) -> None:
        """Remove the old target, after its successor is in place."""
        if self._replaced.exists():
            shutil.rmtree(self._replaced)

    def _lock(self) -> None:
        """Lock the lock file; make it, as often as its last owner has just removed it."""
        while True:
            self._work.mkdir(exist_ok=True)
            try:
                descriptor = os.open(self._lock_file, os.O_CREAT | os.O_RDWR, 0o600)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise CheckpointError(f"another conversion is writing {self.path}") from None
            if _same_file(descriptor, self._lock_file):
                self._descriptor = descriptor
                return
            os.close(descriptor)

    def _recover(self) -> None:
        """Undo a replacement that was interrupted between its two renames, or finish it after."""
        if not self._replaced.exists():
            return
        if self.path.exists():
            shutil.rmtree(self._replaced)
        else:
            self._replaced.rename(self.path)
            sync_path(self.path.parent)


def refuse_existing(target: Path, force: bool, weights_of: WeightsOf) -> None:
    """Refuse a target that exists and may not be replaced.

    Raises:
        CheckpointError: Saying what would be lost.
    """
    if not target.exists():
        return
    if not force:
        raise CheckpointError(f"the target {target} exists; --force replaces it after success")
    entries = list(target.iterdir())
    if not entries:
        return
    weights = weights_of(target)
    if weights is None:
        raise CheckpointError(
            f"the target {target} exists and is no checkpoint; --force replaces only a checkpoint "
            "or an empty folder"
        )
    # Whatever else is in there would be lost: a training run's other checkpoints, for instance.
    others = sorted(entry.name for entry in entries if entry.is_dir() and entry != weights)
    if others:
        raise CheckpointError(
            f"the target {target} holds folders that are no part of its checkpoint: "
            f"{', '.join(others[:5])}; --force would delete them, so it does nothing"
        )


def sync_tree(folder: Path, synced: Collection[Path] = ()) -> None:
    """Wait until every folder in ``folder``, and every file but those ``synced``, is on disk."""
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            if Path(root, name) not in synced:
                sync_path(Path(root, name))
        sync_path(Path(root))


def sync_path(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(descriptor)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
