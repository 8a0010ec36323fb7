"""Whether files and folders can be written, before the work whose results they take."""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from console.ranks import rank

_PROBE = b"\0" * 4096
_Paths = Mapping[str, str | Path | None]


def require_writable(*, folders: _Paths | None = None, files: _Paths | None = None) -> None:
    """Try to write there, and leave everything as it was; by the first process of a job.

    Args:
        folders: By option; None for an option that was not given. Missing ones will be made.
        files: Likewise.

    Raises:
        ValueError: Naming the option, its path and what is in the way.
    """
    if rank():
        return
    for paths, attempt in ((folders, _try_folder), (files, _try_file)):
        for option, path in (paths or {}).items():
            if path is not None:
                _check(option, str(path), attempt)


def _check(option: str, path: str, attempt: Callable[[Path], None]) -> None:
    if not path:
        raise ValueError(f"{option} must name what to write, got an empty text")
    try:
        attempt(Path(path))
    except OSError as error:
        where = f" ({error.filename})" if error.filename not in (None, path) else ""
        reason = error.strerror or str(error)
        raise ValueError(f"{option} {path} cannot be written: {reason}{where}") from None


def _try_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is no folder", str(folder))
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Some bytes, too: names need no room on a disk that is full.
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(_PROBE)
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def _try_file(file: Path) -> None:
    _try_folder(file.parent)
    if file.exists():
        with file.open("ab"):
            pass
