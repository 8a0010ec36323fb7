"""A folder of block files with a bound on its size, which several processes may share.

A file is found by the hash of the tokens up to the end of its block, in a folder named after all
else that its latents depend on. It is written beside its place and renamed, so that readers see
whole files only. Beyond the bound, the files that were used longest ago are deleted, whoever
wrote them: a file's time of modification is when it was last used.
"""

from __future__ import annotations

import contextlib
import itertools
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

from absorbed_mla.generation.prefix.block_file import BlockLayout, read_block, write_block
from absorbed_mla.log_once import times_logged

logger = logging.getLogger(__name__)

# Checksums take a core each; reading files takes more.
_THREADS = 8
# Blocks read ahead of the one that is wanted, and blocks in memory that wait to be written.
_AHEAD, _WAITING = 32, 128
# Blocks written between two looks at the size of the folder.
_BETWEEN_TRIMS = 64
_FILE = re.compile(r"[0-9a-f]{16}\.safetensors")
_FOLDER = re.compile(r"[0-9a-f]{32}")
# Files that a process was writing when it ended.
_STALE_SECONDS = 3600


class PrefixFolder:
    """Reads and writes the blocks of one fingerprint.

    Args:
        root: The folder that processes share.
        fingerprint: 32 hexadecimal digits.
        layout: Of a block.
        limit: Bytes of all files under ``root``.
    """

    def __init__(self, root: Path, fingerprint: str, layout: BlockLayout, limit: int) -> None:
        self._root, self._limit, self._layout = root, limit, layout
        self._fingerprint = fingerprint
        self._own = root / fingerprint
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="prefix-cache")
        self._room = threading.BoundedSemaphore(_WAITING)
        self._written: list[Future] = []
        self._since_trim = 0
        # Files that may not be used, until they are written anew.
        self._refused: set[int] = set()

    def has(self, hash_: int) -> bool:
        """Whether there is a file, which may still be refused."""
        return hash_ not in self._refused and self._path(hash_).exists()

    def read(self, hashes: Sequence[int]) -> Iterator[dict[str, Tensor]]:
        """The blocks of these hashes in order, up to the first one that is missing or refused."""
        starts = iter(hashes)
        ahead = [self._pool.submit(self._read, one) for one in itertools.islice(starts, _AHEAD)]
        while ahead:
            found = ahead.pop(0).result()
            if found is None:
                break
            ahead += [self._pool.submit(self._read, one) for one in itertools.islice(starts, 1)]
            yield found
        for future in ahead:
            future.cancel()

    def touch(self, hashes: Sequence[int]) -> None:
        """Count these blocks of one text, in order, as used now, the last one least.

        A block without the ones before it is of no use, so it has to go first.
        """
        now = time.time_ns()
        for i, one in enumerate(hashes):
            try:
                os.utime(self._path(one), ns=(now, now - i))
            except OSError:  # deleted meanwhile
                break

    def write(self, hash_: int, tensors: Mapping[str, Tensor]) -> None:
        """Write a block in the background; waits where too many do.

        Args:
            hash_: Of the tokens up to its end.
            tensors: Of the layout, on the CPU, not changed any more.
        """
        self._room.acquire()
        self._written.append(self._pool.submit(self._write, hash_, tensors, time.time_ns()))
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

    def _path(self, hash_: int) -> Path:
        return self._own / f"{hash_:016x}.safetensors"

    def _key(self, hash_: int) -> dict[str, str]:
        return {"fingerprint": self._fingerprint, "tokens": f"{hash_:016x}"}

    def _read(self, hash_: int) -> dict[str, Tensor] | None:
        path = self._path(hash_)
        try:
            return read_block(path, self._layout, self._key(hash_))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._refused.add(hash_)
            self._warn("a file is not used, and what it held is computed again", path, error)
            return None

    def _write(self, hash_: int, tensors: Mapping[str, Tensor], used: int) -> None:
        path = self._path(hash_)
        # Containers that share the folder may have equal process ids.
        beside = self._own / f".{path.stem}.{uuid.uuid4().hex}"
        try:
            self._own.mkdir(parents=True, exist_ok=True)
            write_block(beside, tensors, self._layout, self._key(hash_))
            os.utime(beside, ns=(used, used))
            beside.replace(path)
            self._refused.discard(hash_)
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
            if not any(folder.iterdir()):
                self._remove(folder)

    @staticmethod
    def _remove(folder: Path) -> None:
        with contextlib.suppress(OSError):  # another process has written to it, or removed it
            folder.rmdir()

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Last use, size and path of every block; removes what ended processes left."""
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
