"""Where a figure comes from: facts that every benchmark records."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# What the time of an attention on a GPU depends on.
ATTENTION_PACKAGES = (
    "torch",
    "megatron-core",
    "transformer-engine-torch",
    "triton",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
)


def today() -> str:
    """The date, UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


def commit() -> str:
    """Of the checkout, or as ``GIT_COMMIT`` names it for a copy that is none."""
    if os.environ.get("GIT_COMMIT"):
        return os.environ["GIT_COMMIT"]
    if not shutil.which("git"):
        return "unknown"
    command = ["git", "describe", "--always", "--dirty"]
    folder = Path(__file__).parent
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def processor() -> str:
    """Name of the CPU."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of Python and of the packages."""
    return {"python": platform.python_version()} | {name: _version(name) for name in packages}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    from console.script import no_script

    no_script(__file__, __doc__)
