"""Commands that benchmarks run, with their output in a log."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from console.parent import ends_with_this_process

# Environment of a job of one process without torchrun, whose port nobody connects to.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
ALONE |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


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
