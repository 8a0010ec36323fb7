"""Whether files and folders can be written, before the work whose results they take."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Mapping
from pathlib import Path

from console.ranks import rank

_PROBE = b"\0" * 4096


def require_writable(
    *,
    folders: Mapping[str, str | Path | None] | None = None,
    files: Mapping[str, str | Path | None] | None = None,
) -> None:
    """Make the folders that are missing, and write something there that nobody sees.

    Args:
        folders: By option; None for an option that was not given.
        files: Likewise; the first process writes them. A file that is there keeps its content.

    Raises:
        ValueError: Naming the option, its path and what is in the way.
    """
    for option, path in (folders or {}).items():
        if path is not None:
            _check(option, path, _try_folder, Path(path))
    for option, path in (files or {}).items():
        if path is not None and not rank():
            _check(option, path, _try_file, Path(path))


def _check(option: str, path: str | Path, attempt, target: Path) -> None:
    if not str(path):
        raise ValueError(f"{option} must name what to write, got an empty text")
    try:
        attempt(target)
    except OSError as error:
        where = f" ({error.filename})" if error.filename not in (None, str(target)) else ""
        raise ValueError(
            f"{option} {path} cannot be written: {error.strerror or error}{where}"
        ) from None


def _try_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is no folder", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    # Some bytes, too: names need no room on a disk that is full.
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(_PROBE)


def _try_file(file: Path) -> None:
    _try_folder(file.parent)
    if file.exists():
        with file.open("ab"):
            pass
