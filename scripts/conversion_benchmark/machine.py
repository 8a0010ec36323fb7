"""What a figure was measured on and with."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "safetensors", "xxhash")


def describe(folder: Path) -> dict:
    """Machine, versions, date and command line; ``folder`` is on the disk that is measured."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", *sys.argv]),
        "commit": _commit(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "filesystem": filesystem(folder),
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in PACKAGES},
    }


def filesystem(folder: Path) -> str:
    """Type of the file system that ``folder`` is on."""
    path = folder.resolve()
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    around = [(point, kind) for point, kind in mounts if path.is_relative_to(point)]
    # Of mounts at one place, the last is the one to be seen.
    return max(reversed(around), key=lambda mount: len(mount[0]))[1]


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
