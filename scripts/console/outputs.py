"""Check before the work begins that output files and folders can be written."""

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
    """Try to write to each path, and undo it. Only rank 0 tries; other ranks return at once.

    Args:
        folders: Folder of each option, None if the option was not given. It need not exist.
        files: File of each option, likewise.

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
        raise ValueError(f"{option} must be a path, got an empty string")
    try:
        attempt(Path(path))
    except OSError as error:
        where = f" ({error.filename})" if error.filename not in (None, path) else ""
        reason = error.strerror or str(error)
        raise ValueError(f"{option} {path} cannot be written: {reason}{where}") from None


def _try_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(folder))
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A full disk takes empty files, so some bytes are written.
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
