"""Scripts that tests run, forked from a process that has imported PyTorch and Megatron."""

import subprocess
import sys

from tests.support import needs
from tests.support.environment import without_launcher
from tests.support.forked_python import forks_python

_TIMEOUT = 600
# Only before it has used a GPU can a process be forked.
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
_LAUNCHER = _TORCHRUN if needs.HAS_GPU else ("-m", "tests.support.forked")


def run_script(
    *command: object, ranks: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, as ``python SCRIPT ARGUMENT...`` does in this folder.

    With ``ranks`` it has so many processes, as torchrun starts them.
    """
    words = [*((*_LAUNCHER, ranks) if ranks else ()), *command]
    with forks_python():
        return subprocess.run(
            [sys.executable, *map(str, words)],
            env=without_launcher(OMP_NUM_THREADS="1") | environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
        )
