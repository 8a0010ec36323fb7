"""The job server ends ranks that take too long."""

import time

import pytest

PROGRAM = "import os, sys, time; rank = int(os.environ['RANK']); {}"


@pytest.fixture
def program(tmp_path):
    def write(last: str):
        (tmp_path / "program.py").write_text(PROGRAM.format(last))
        return tmp_path / "program.py"

    return write


@pytest.mark.parametrize("how", [{"grace": 0.2}, {"timeout": 0.2}])
def test_ranks_over_time_are_killed(server, tmp_path, program, how):
    """After the grace period of a failure, or the timeout of all; the exit code is None."""
    start = time.monotonic()
    last = "time.sleep(60 * (rank == 0)); sys.exit(3)" if "grace" in how else "time.sleep(60)"
    codes, _, _ = server.run([program(last)], tmp_path, ranks=2, **how)
    assert codes == ([None, 3] if "grace" in how else [None, None])
    assert time.monotonic() - start < 50
