"""What a figure was measured on and with."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from pathlib import Path

import provenance

PACKAGES = ("torch", "safetensors", "xxhash")


def describe(folder: Path) -> dict:
    """Machine, versions, date and command line; ``folder`` is on the disk that is measured."""
    return {
        "date": provenance.today(),
        "command": shlex.join(["python", *sys.argv]),
        "commit": provenance.commit(),
        "processor": provenance.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "filesystem": filesystem(folder),
        "versions": provenance.versions(PACKAGES),
    }


def filesystem(folder: Path) -> str:
    """Type of the file system that ``folder`` is on."""
    path = folder.resolve()
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    around = [(point, kind) for point, kind in mounts if path.is_relative_to(point)]
    # Of mounts at one place, the last is the one to be seen.
    return max(reversed(around), key=lambda mount: len(mount[0]))[1]
