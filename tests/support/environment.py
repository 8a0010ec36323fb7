"""The environment of programs that tests start, and Python in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")


def launcher_variables() -> dict[str, str]:
    """Torchrun's, of this process."""
    return {name: os.environ[name] for name in _LAUNCHER if name in os.environ}


def without_launcher(**more: str) -> dict[str, str]:
    """This process's environment without torchrun's variables, and with ``more``."""
    return {name: value for name, value in os.environ.items() if name not in _LAUNCHER} | more


def run_python(
    *arguments: object, path: Sequence[Path | str] = (), cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A new interpreter with these folders alone in ``PYTHONPATH``; coverage is not measured."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **variables}
    environment.pop("COVERAGE_FILE", None)
    command = [sys.executable, "-W", "ignore", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
