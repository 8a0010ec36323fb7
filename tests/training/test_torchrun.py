"""One mistake under torchrun: our line, and torchrun's own report about one process.

If this fails, a reader looks for the mistake in a page about processes that only were ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train.py"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lrr 3", "unrecognized arguments: --lrr 3 (--help lists all options)"),
        ("--save /dev/null", "--save /dev/null cannot be written: it is no folder"),
    ],
)
def test_a_mistake(words, message):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *words.split()],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    # Its own line, and the reason in torchrun's report.
    assert lines.count(f"train.py: error: {message}") == 1
    assert [line for line in lines if line.endswith(f": train.py: error: {message}")] == [
        f"  traceback : train.py: error: {message}"
    ]
    assert done.stderr.count("  rank      : ") == 1
    assert "<NO_OTHER_FAILURES>" in done.stderr
