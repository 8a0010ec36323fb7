"""The folder of a prefix cache: bounded in size, shared by processes, LRU first out.

A block is found by the hash of the tokens up to its end, in the files of a folder named after all
else that its latents depend on; what they hold is in their headers, which are read once. A file is
written beside its place and renamed, so that readers see whole files only. Beyond the bound, the
files that were used longest ago are deleted, whoever wrote them: a file's time of modification is
when it was last used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from absorbed_mla.log_once import times_logged
from absorbed_mla.serving.prefix_cache.block_file import (
    BlockLayout,
    Group,
    Views,
    group_name,
    read_blocks,
    read_header,
    write_group,
)

logger = logging.getLogger(__name__)

_THREADS = 8
# Bytes of a file, of which a bound on all files lets at least four be there; and those that a
# thread reads at a time.
_FILE_BYTES, _READ_BYTES = 2**25, 2**22
# Files in memory that wait to be written, and files written between two looks at the size of the
# folder.
_WAITING, _BETWEEN_TRIMS = 16, 16
_FILE = re.compile(r"[0-9a-f]{32}\.safetensors")
_FOLDER = re.compile(r"[0-9a-f]{32}")
# Files that a process was writing when it ended.
_STALE_SECONDS = 3600


class PrefixFolder:
    """Reads and writes the blocks of one fingerprint.

    Args:
        root: The folder that processes share.
        fingerprint: 32 hexadecimal digits.
        limit: Bytes of all files under ``root``.

    Attributes:
        blocks_per_file: Most blocks that are written together.
    """

    def __init__(self, root: Path, fingerprint: str, layout: BlockLayout, limit: int) -> None:
        self._root, self._limit, self._layout = root, limit, layout
        self._fingerprint = fingerprint
        self._own = root / fingerprint
        self.blocks_per_file = max(1, min(_FILE_BYTES, limit // 4) // layout.num_bytes)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="prefix-cache")
        self._room = threading.BoundedSemaphore(_WAITING)
        self._written: list[Future] = []
        self._since_trim = 0
        # The file and the place in it of every block, and the blocks of every file; none of a file
        # that may not be used until it is written anew. Threads change them under the lock.
        self._lock = threading.Lock()
        self._places: dict[int, tuple[str, int]] = {}
        self._held: dict[str, tuple[int, ...]] = {}
        self._seen: int | None = None

    def has(self, hash_: int) -> bool:
        """Whether a file has this block, as far as was known at the last :meth:`leading`."""
        return hash_ in self._places

    def leading(self, hashes: Sequence[int]) -> int:
        """How many blocks files have, up to the first that is missing; any may still be refused."""
        self._look()
        return next((i for i, one in enumerate(hashes) if not self.has(one)), len(hashes))

    def read(self, hashes: Sequence[int], targets: Sequence[Sequence[Views]]) -> int:
        """Read blocks, in order, up to the first one that is missing or refused.

        Args:
            targets: For each block the memory of each of its tensors; that of blocks behind the
                first one that is refused may have changed as well.

        Returns:
            How many were read.
        """
        futures = [
            (end - first, self._pool.submit(self._read, hashes[first:end], targets[first:end]))
            for first, end in self._pieces(hashes)
        ]
        found = [(wanted, future.result()) for wanted, future in futures]
        done = 0
        for wanted, count in found:
            done += count
            if count < wanted:
                break
        return done

    def _pieces(self, hashes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Cut into runs that are neighbours in a file, as long as a thread reads at a time."""
        most = max(1, _READ_BYTES // self._layout.num_bytes)
        places = [self._places.get(one) for one in hashes]
        start = 0
        for end in range(1, len(hashes) + 1):
            last = places[end - 1]
            following = last and (last[0], last[1] + 1)
            if end == len(hashes) or end - start == most or places[end] != following:
                yield start, end
                start = end

    def touch(self, hashes: Sequence[int]) -> None:
        """Count these blocks of one text, in order, as used now, the last one least.

        A block without the ones before it is of no use, so it has to go first.
        """
        now = time.time_ns()
        names = dict.fromkeys(self._places[one][0] for one in hashes if one in self._places)
        for i, name in enumerate(names):
            try:
                os.utime(self._own / name, ns=(now, now - i))
            except OSError:  # deleted meanwhile
                break

    def write(self, hashes: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        """Write a file of blocks in the background; waits where too many do.

        Args:
            hashes: Of the tokens up to the end of each block, at most ``blocks_per_file``.
            tensors: Of the layout, [blocks, *shape], on the CPU, not changed any more.
        """
        self._room.acquire()
        job = self._pool.submit(self._write, tuple(hashes), tensors, time.time_ns())
        self._written.append(job)
        self._since_trim += 1
        if self._since_trim >= _BETWEEN_TRIMS:
            self._since_trim = 0
            self._written = [future for future in self._written if not future.done()]
            self._written.append(self._pool.submit(self._trim))

    def flush(self) -> None:
        """Wait until everything is written, and keep the bound."""
        written, self._written = self._written, []
        for future in written:
            future.result()
        self._trim()

    def close(self) -> None:
        """Flush, and end the threads."""
        self.flush()
        self._pool.shutdown()

    def _look(self) -> None:
        """Find the files that came, and forget those that went, since the last time."""
        try:
            changed = self._own.stat().st_mtime_ns
            if changed == self._seen:
                return
            entries = [entry for entry in os.scandir(self._own) if _FILE.fullmatch(entry.name)]
        except OSError:  # nothing there
            entries, changed = [], None
        self._seen = changed
        names = {entry.name for entry in entries}
        with self._lock:
            new = names - self._held.keys()
            for name in self._held.keys() - names:
                self._forget(name)
                del self._held[name]
        # Of files that have the same block, the newest is used.
        for name, group in sorted(zip(new, self._pool.map(self._header, new)), key=_age):
            self._hold(name, () if group is None else group[1].hashes)

    def _header(self, name: str) -> tuple[int, Group] | None:
        """Time of modification and header of a file; None if it is refused or gone."""
        path = self._own / name
        try:
            with path.open("rb") as file:
                found = read_header(file.fileno(), name, self._layout, self._fingerprint)
                return os.fstat(file.fileno()).st_mtime_ns, found
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._warn("a file is not used, and what it held is computed again", path, error)
            return None

    def _hold(self, name: str, hashes: tuple[int, ...]) -> None:
        with self._lock:
            self._held[name] = hashes
            self._places.update({one: (name, i) for i, one in enumerate(hashes)})

    def _forget(self, name: str) -> None:
        """Use a file's blocks no more; the lock is held."""
        for one in self._held.get(name, ()):
            if self._places.get(one, ("",))[0] == name:
                del self._places[one]

    def _read(self, hashes: Sequence[int], targets: Sequence[Sequence[Views]]) -> int:
        """Blocks of one file, neighbours in it."""
        name, _ = self._places.get(hashes[0], ("", 0))
        path = self._own / name
        found = 0
        try:
            if not name:
                return 0
            found = read_blocks(path, hashes, targets, self._layout, self._fingerprint)
            if found < len(hashes):
                raise ValueError("the checksum of a block is wrong")
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            with self._lock:
                self._forget(name)
                self._held[name] = ()
            self._warn("a file is not used, and what it held is computed again", path, error)
        return found

    def _write(self, hashes: tuple[int, ...], tensors: Mapping[str, Tensor], used: int) -> None:
        path = self._own / group_name(hashes)
        # Containers that share the folder may have equal process ids.
        beside = self._own / f".{path.stem}.{uuid.uuid4().hex}"
        try:
            self._own.mkdir(parents=True, exist_ok=True)
            write_group(beside, hashes, tensors, self._layout, self._fingerprint)
            os.utime(beside, ns=(used, used))
            beside.replace(path)
            self._hold(path.name, hashes)
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            self._warn("a file was not written", path, error)
        finally:
            self._room.release()

    def _warn(self, what: str, path: Path, error: Exception) -> None:
        """Once per folder and kind; further files are not named."""
        message = f"prefix_cache_dir {self._root}: {what}"
        if next(times_logged(logger, message)) == 0:
            logger.warning(f"{message} (no further warning): {path}: {error}")

    def _trim(self) -> None:
        """Delete the files used longest ago until the others keep the bound."""
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= self._limit:
                break
            path.unlink(missing_ok=True)
            total -= size
        for folder in {path.parent for _, _, path in files} - {self._own}:
            with contextlib.suppress(OSError):  # another process has written to it, or removed it
                if not any(folder.iterdir()):
                    folder.rmdir()

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Last use, size and path of every file; removes what ended processes left."""
        for entry in self._entries():
            try:
                found = entry.stat()
                if _FILE.fullmatch(entry.name):
                    yield found.st_mtime_ns, found.st_size, entry
                elif entry.name.startswith(".") and found.st_mtime < time.time() - _STALE_SECONDS:
                    entry.unlink(missing_ok=True)
            except FileNotFoundError:  # deleted meanwhile
                continue

    def _entries(self) -> Iterator[Path]:
        for folder in self._root.iterdir() if self._root.exists() else ():
            if _FOLDER.fullmatch(folder.name) and folder.is_dir():
                yield from folder.iterdir()


def _age(found: tuple[str, tuple[int, Group] | None]) -> int:
    return 0 if found[1] is None else found[1][0]
