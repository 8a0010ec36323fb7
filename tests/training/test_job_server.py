"""The job server: environment of the programs that it forks, and their exit codes."""

import time

import pytest

PROGRAM = """
import os, signal, sys, time
rank = int(os.environ.get("RANK", -1))
print(rank, os.environ.get("WORLD_SIZE"), sys.argv[1:], os.getcwd(), __name__)
print("to stderr", file=sys.stderr)
{}
"""
ENDINGS = {
    "pass": 0,
    "sys.exit()": 0,
    "sys.exit(3)": 3,
    "sys.exit('a message')": 1,
    "raise KeyError('reason')": 1,
    "os.kill(os.getpid(), signal.SIGKILL)": -9,
}


@pytest.fixture
def program(tmp_path):
    def write(last: str):
        (tmp_path / "program.py").write_text(PROGRAM.format(last))
        return tmp_path / "program.py"

    return write


@pytest.mark.parametrize("last", ENDINGS)
def test_one_process(server, tmp_path, program, last):
    [code], [out], [err] = server.run([program(last), "a", 2], tmp_path)
    assert code == ENDINGS[last]
    if code != -9:  # nothing is flushed
        assert out == f"-1 None ['a', '2'] {tmp_path} __main__\n"
        assert err.startswith("to stderr\n")
    if code == 1:
        assert "a message" in err or "KeyError: 'reason'" in err


def test_ranks_meet(server, tmp_path, program):
    """They form a process group from the variables that torchrun sets."""
    meet = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(x := torch.tensor([rank + 1]))
print(x.item())
dist.destroy_process_group()
"""
    codes, outs, _ = server.run([program(meet)], tmp_path, ranks=2)
    assert codes == [0, 0]
    assert [out.splitlines() for out in outs] == [
        [f"{rank} 2 [] {tmp_path} __main__", "3"] for rank in range(2)
    ]


@pytest.mark.parametrize("how", [{"grace": 0.2}, {"timeout": 0.2}])
def test_ranks_over_time_are_killed(server, tmp_path, program, how):
    """After the grace period of a failure, or the timeout of all; the exit code is None."""
    start = time.monotonic()
    last = "time.sleep(60 * (rank == 0)); sys.exit(3)" if "grace" in how else "time.sleep(60)"
    codes, _, _ = server.run([program(last)], tmp_path, ranks=2, **how)
    assert codes == ([None, 3] if "grace" in how else [None, None])
    assert time.monotonic() - start < 50
