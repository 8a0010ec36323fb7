"""Scripts that tests run, forked from a process that has imported PyTorch and Megatron.

These imports take five seconds of a core, more than most of the scripts do with small arguments.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support import needs
from tests.support.environment import without_launcher
from tests.support.job_server import JobServer

_TIMEOUT = 600
# What a launcher tells its processes.
_OF_RANKS = ("RANK", "LOCAL_", "WORLD_", "MASTER_", "TORCHELASTIC_")


@dataclass(frozen=True)
class Done:
    """How a script ended, with what rank 0 printed."""

    returncode: int
    stdout: str
    stderr: str


def run_script(*command: object, ranks: int = 0, **environment: str) -> Done:
    """Run a script to its end, as ``python SCRIPT ARGUMENT...`` does in this folder.

    Args:
        command: The script's file, and its arguments.
        ranks: Number of processes, as torchrun starts them; 0: one without torchrun.
        environment: Variables, besides those of this process.
    """
    words = [str(word) for word in command]
    variables = without_launcher(OMP_NUM_THREADS="1") | environment
    # Only before it has used a GPU can a process be forked.
    if needs.HAS_GPU:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        started = [sys.executable, *(launcher if ranks else ()), *words]
        done = subprocess.run(
            started, env=variables, capture_output=True, text=True, timeout=_TIMEOUT
        )
        return Done(done.returncode, done.stdout, done.stderr)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "variables.json"
        file.write_text(json.dumps([os.getcwd(), variables]))
        argv = ["-m", __name__, file, *words]
        codes, outs, errs = _server().run(argv, Path(folder), ranks, timeout=_TIMEOUT)
    failed = next((rank for rank, code in enumerate(codes) if code != 0), 0)
    code = codes[failed]
    return Done(-9 if code is None else code, outs[0], errs[failed])


@functools.cache
def _server() -> JobServer:
    """One for all tests of this process."""
    server = JobServer([], [])
    atexit.register(server.__exit__)
    return server


def _main(variables: str, *command: str) -> None:
    """What a forked process does: takes the folder and the variables, and runs the script."""
    folder, environment = json.loads(Path(variables).read_text())
    of_rank = {name: value for name, value in os.environ.items() if name.startswith(_OF_RANKS)}
    os.environ.clear()
    os.environ.update(environment | of_rank)
    gc.freeze()  # what is imported stays, and is shared with the server
    os.chdir(folder)
    sys.argv = list(command)
    sys.path[0] = str(Path(command[0]).parent)
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    _main(*sys.argv[1:])
