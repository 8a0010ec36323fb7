"""Commands that benchmarks run: time and memory with a cold page cache, or output in a log."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from console.parent import ends_with_this_process

SAMPLE_SECONDS = 0.05
# Environment of a job of one process without torchrun, whose port nobody connects to.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
ALONE |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


class CommandError(RuntimeError):
    """A measured command that failed; the message ends with the last of its output."""


@dataclass(frozen=True)
class Run:
    """What one run of a command took."""

    seconds: float  # from its start until its output is on disk
    peak_bytes: int  # most resident memory of its processes together, mapped files included
    anonymous_bytes: int  # most resident memory without mapped files, by samples


def measure(command: Sequence[str], source: Path, target: Path, log: Path) -> Run:
    """Run a command that reads ``source`` and writes ``target``.

    Before, everything is on disk and nothing of ``source`` is in memory; the time ends when the
    file system has written all of ``target``.

    Args:
        command: With its arguments.
        source: Folder, dropped from the page cache.
        target: Folder.
        log: File that takes the command's output.

    Raises:
        CommandError: If it fails.
    """
    forget(source)
    with log.open("w") as output:
        begin = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=ends_with_this_process()
        )
        peak, anonymous = _wait(process)
        if process.returncode:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            raise CommandError(f"{' '.join(command)} ended with {process.returncode}:\n{tail}")
        sync(target)
        seconds = time.perf_counter() - begin
    return Run(seconds, peak, anonymous)


def run_to_log(
    command: Sequence[str], log: Path, timeout: float, variables: Mapping[str, str] | None = None
) -> int | None:
    """Run a command with its output in a file.

    Args:
        command: With its arguments.
        log: File that takes the output.
        timeout: Seconds after which it is ended.
        variables: More of its environment.

    Returns:
        The exit code; None if it was ended.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
    environment |= variables or {}
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=ends_with_this_process(),
        )
        try:
            return process.wait(timeout)
        except BaseException as reason:
            # SIGTERM, not SIGKILL: torchrun must end its workers.
            process.terminate()
            process.wait()
            if not isinstance(reason, subprocess.TimeoutExpired):
                raise
            return None


def forget(folder: Path) -> None:
    """Write everything to disk, then drop the files of ``folder`` from the page cache."""
    sync(folder)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync(path: Path) -> None:
    """Wait until the file system that ``path`` is on has written everything."""
    subprocess.run(["sync", "-f", str(path)], check=True)


def _wait(process: subprocess.Popen) -> tuple[int, int]:
    """Wait for a process; returns the peaks of its tree, total and anonymous."""
    peak = anonymous = 0
    try:
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            samples = [_status(one, "VmRSS", "RssAnon") for one in _tree(process.pid)]
            peak = max(peak, sum(total for total, _ in samples))
            anonymous = max(anonymous, sum(own for _, own in samples))
            time.sleep(SAMPLE_SECONDS)
    except BaseException:
        process.kill()
        process.wait()
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    # The kernel's high-water mark sees what happens between samples. But it is of one process, and
    # starts at the mark of the process that forked it, this one: it counts only where it is above
    # that, or where there was no sample (better too much than nothing).
    if not peak or usage.ru_maxrss * 1024 > _status(os.getpid(), "VmHWM")[0]:
        peak = max(peak, usage.ru_maxrss * 1024)
    return peak, anonymous


def _tree(pid: int) -> list[int]:
    """A process and its descendants."""
    result = [pid]
    for parent in result:
        with contextlib.suppress(OSError):  # it has ended
            for task in Path(f"/proc/{parent}/task").iterdir():
                result += map(int, (task / "children").read_text().split())
    return result


def _status(pid: int, *keys: str) -> list[int]:
    """Bytes that the kernel gives under ``keys`` for a process; 0 if it has ended."""
    text = ""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text()
    values = dict(line.split(":", 1) for line in text.splitlines())
    return [int(values.get(key, "0").split()[0]) * 1024 for key in keys]


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
