"""Runs of scripts/train.py: in forked processes, which start quickly, or under torchrun."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.environment import without_launcher
from tests.support.job_server import JobServer

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.append(str(SCRIPTS))


@pytest.fixture(scope="session")
def server() -> Iterator[JobServer]:
    """Forks processes in which the modules of scripts/train.py are imported already."""
    with JobServer(["training.run"], [SCRIPTS]) as server:
        yield server


@pytest.fixture(scope="session")
def train(server: JobServer) -> Callable[..., str]:
    """Runs scripts/train.py in a folder; returns the stdout of rank 0.

    ``processes`` is the number of ranks, 0 for a process without torchrun. With an ``expect`` other
    than 0, the exit code must be that, and stderr is returned.
    """

    def run(folder: Path, options: str, processes: int = 0, expect: int = 0) -> str:
        command = [SCRIPTS / "train.py", *options.split()]
        codes, outputs, errors = server.run(command, folder, processes)
        assert codes == [expect] * len(codes), [error[-3000:] for error in errors]
        return errors[0] if expect else outputs[0]

    return run


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., subprocess.Popen]:
    """Starts scripts/train.py with torchrun, in a session of its own."""

    def start(options: str, processes: int, **more) -> subprocess.Popen:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
        return subprocess.Popen(
            [sys.executable, *launcher, str(processes), SCRIPTS / "train.py", *options.split()],
            env=without_launcher(OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **more,
        )

    return start
