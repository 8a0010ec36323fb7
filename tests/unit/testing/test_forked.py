"""tests/support/forked.py says what ended a rank that the others only see gone."""

import subprocess
import sys

from tests.support import needs
from tests.support.environment import without_launcher
from tests.support.job_server import ROOT

pytestmark = needs.no_gpu

# Without Megatron, which takes seconds to import.
LAUNCHER = """
import sys
from tests.support import forked
forked.IMPORTS = ()
sys.exit(forked.main(["2", sys.argv[1]]))
"""
PROGRAM = """
import os, signal
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_end_by_a_signal(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LAUNCHER, str(script)],
        env=without_launcher(),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("[rank")]
    assert told == ["[rank 1] was ended by SIGSEGV"]
