"""The journal of an unfinished conversion: one JSON document per line, append only.

The first line identifies the conversion; each further line records a part whose files are on disk.
A line without its line feed was cut short by a kill and is ignored.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.base import PartResult
from checkpoint_conversion.manifest import read_record

_RESTART = "without --resume the conversion starts anew"
_FIELDS = {"name": str, "files": dict, "tensors": list, "storage": dict}


class Journal:
    """The journal of a conversion, open for appending.

    Args:
        path: The file; it exists and ends with a line feed.
        results: Parts that are already recorded, by name.
    """

    def __init__(self, path: Path, results: dict[str, PartResult] | None = None) -> None:
        # Unbuffered: a buffer would keep what a full disk refused and write it later.
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()
        self.results = results or {}

    @classmethod
    def create(cls, path: Path, fingerprint: dict) -> Journal:
        """Start the journal of the conversion that a fingerprint identifies."""
        path.touch(exist_ok=False)
        journal = cls(path)
        journal._append({"fingerprint": fingerprint})
        return journal

    @classmethod
    def resume(cls, path: Path, fingerprint: dict) -> Journal | None:
        """Continue a journal; None if its first line is not complete.

        Raises:
            CheckpointError: If it is damaged or of another conversion, saying what differs.
        """
        data = path.read_bytes() if path.exists() else b""
        complete = data[: data.rfind(b"\n") + 1]
        if not complete:
            return None
        head, *lines = _documents(complete)
        before = head.get("fingerprint")
        # In JSON a tuple becomes a list.
        now = json.loads(json.dumps(fingerprint))
        if before != now:
            raise CheckpointError(
                f"the unfinished conversion in {path.parent} is another one; {_RESTART}. "
                "What differs:",
                list(differences(before, now)),
            )
        os.truncate(path, len(complete))
        results = [_part_result(line) for line in lines]
        return cls(path, {result.name: result for result in results})

    def add(self, *results: PartResult) -> None:
        """Record parts whose files are on disk; thread-safe."""
        with self._lock:
            self._append(*({"part": asdict(result)} for result in results))
            self.results.update((result.name, result) for result in results)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def drop_damaged(self, folder: Path) -> list[str]:
        """Drop parts whose files are missing or have another size than recorded.

        Returns:
            The names of the dropped parts.
        """
        damaged = [
            name for name, part in self.results.items() if not files_are_there(folder, part.files)
        ]
        for name in damaged:
            del self.results[name]
        return damaged

    def _append(self, *documents: dict) -> None:
        end = os.fstat(self._file.fileno()).st_size
        lines = b"".join(json.dumps(document).encode() + b"\n" for document in documents)
        try:
            while lines:
                lines = lines[self._file.write(lines) :]
            os.fsync(self._file.fileno())
        except OSError:
            # Remove half a line, so that the next one starts cleanly.
            self._file.truncate(end)
            raise


def files_are_there(folder: Path, sizes: Mapping[str, int]) -> bool:
    """Whether all files exist in a folder with the given sizes."""
    files = ((folder / name, size) for name, size in sizes.items())
    return all(file.is_file() and file.stat().st_size == size for file, size in files)


def differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """What differs between two JSON documents, one line each."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            inner = f"{name}: {key}" if name else key
            yield from differences(before.get(key), now.get(key), inner)
    elif before != now:
        yield f"{name} was {_short(before)}, is {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _documents(data: bytes) -> list[dict]:
    documents = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise CheckpointError(f"line {number} of the journal is damaged; {_RESTART}")
        documents.append(document)
    return documents


def _part_result(document: dict) -> PartResult:
    fields = document.get("part")
    if (
        not isinstance(fields, dict)
        or fields.keys() != _FIELDS.keys()
        or not all(isinstance(fields[name], kind) for name, kind in _FIELDS.items())
        or not all(isinstance(size, int) for size in fields["files"].values())
    ):
        raise CheckpointError(f"the journal holds a line that is no part; {_RESTART}")
    try:
        records = [read_record(record) for record in fields["tensors"]]
    except CheckpointError as error:
        raise CheckpointError(f"the journal is damaged: {error}; {_RESTART}") from None
    return PartResult(**{**fields, "tensors": records})
