"""Access to the files of an untrusted checkpoint: nothing outside its folder is read."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path, PurePosixPath
from typing import Any

from checkpoint_conversion.errors import CheckpointError

# The index of a checkpoint of 150 000 tensors has 15 MB.
MAX_JSON_BYTES = 128 << 20


def file_inside(folder: Path, name: str, *, follow_links: bool = False) -> Path:
    """The regular file that ``name`` means inside ``folder``.

    Args:
        folder: The checkpoint's folder.
        name: A path relative to it, from an index or a directory listing.
        follow_links: Whether links may lead out of the folder; ``..`` and absolute names never may.

    Returns:
        The file's real path, with links resolved.

    Raises:
        CheckpointError: If there is no such file, it is not inside, or is not a regular file.
    """
    problem = name_problem(name)
    if problem:
        raise CheckpointError(f"{shown_name(name)} in {folder} {problem}")
    try:
        found = (folder / name).resolve(strict=True)
        home = folder.resolve(strict=True)
        if not follow_links and not found.is_relative_to(home):
            raise CheckpointError(
                f"{name} in {folder} is a link out of the folder, to {found}; --follow-links "
                "allows it"
            )
        regular = stat.S_ISREG(found.stat().st_mode)
    except OSError as error:
        raise CheckpointError(f"{name} in {folder} cannot be read: {error.strerror}") from error
    except RuntimeError as error:
        # Path.resolve raises this for a loop of links before Python 3.13.
        raise CheckpointError(f"{name} in {folder} is a link in a circle") from error
    if not regular:
        raise CheckpointError(f"{name} in {folder} is not a regular file")
    return found


def files_inside(folder: Path, *, follow_links: bool = False) -> dict[str, Path]:
    """Real paths of the files directly in ``folder``, by name, sorted.

    Folders in it are skipped; all else that :func:`file_inside` refuses is listed in one error.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error
    files, problems = {}, []
    for name in names:
        if os.path.isdir(folder / name):
            continue
        try:
            files[name] = file_inside(folder, name, follow_links=follow_links)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(f"{folder} holds what cannot be read:", problems)
    return files


def name_problem(name: str) -> str | None:
    """What is wrong with a file name, as the predicate of a sentence; None if nothing."""
    if not name:
        return "is an empty name"
    # This refuses NUL, and surrogates that no file system can encode, too.
    if not name.isprintable():
        return "has characters that cannot be printed"
    path = PurePosixPath(name)
    if path.is_absolute():
        return "is an absolute path; files of a checkpoint are relative to its folder"
    if ".." in path.parts:
        return "leads out of the folder"
    return None


def shown_name(name: str) -> str:
    """An untrusted name, escaped and shortened for printing."""
    text = name if name and name.isprintable() else ascii(name)
    return text if len(text) <= 200 else f"{text[:197]}..."


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object that a JSON file holds.

    Args:
        path: The file.
        max_bytes: Larger files are refused without parsing them.

    Raises:
        CheckpointError: If it cannot be read, is too large, not UTF-8, not JSON, nested too
            deeply, no object, or gives a name twice.
    """
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise CheckpointError(f"{path} is larger than {max_bytes} bytes")
    try:
        content = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deeply") from error
    # Bad UTF-8, bad JSON, an integer of thousands of digits, a name that is there twice.
    except ValueError as error:
        raise CheckpointError(f"{path} is not acceptable JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold an object, got {type(content).__name__}")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"{shown_name(name)} is there twice")
        result[name] = value
    return result
