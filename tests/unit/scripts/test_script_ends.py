"""How scripts end: a mistake is printed once, as one line; so is Ctrl-C; no process is orphaned.

The processes are small programs that use ``console.script``, with torchrun's environment.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from console.script import Failure, run_script
from tests.support.environment import without_launcher

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
RANK = """
import os, sys, time
sys.path.insert(0, {scripts!r})
from console.script import leave, run_script
rank = int(os.environ.get("RANK", 0))
def work():
{work}
leave(run_script("it.py", work))
"""


def program(work: str) -> list[str]:
    """A command whose ranks do ``work``."""
    lines = "\n".join("    " + line for line in work.splitlines())
    return [sys.executable, "-c", RANK.format(scripts=str(SCRIPTS), work=lines)]


def started(work: str, **options: object) -> subprocess.Popen:
    """A process that does ``work``, without torchrun unless ``env`` says otherwise."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(program(work), **{"env": without_launcher(), **pipes, **options})


class Job:
    """Ranks of one machine with the environment and error files that torchrun gives them."""

    def __init__(self, folder: Path, work: str, ranks: int) -> None:
        self.files = [folder / "attempt_0" / str(rank) / "error.json" for rank in range(ranks)]
        self.processes = []
        for rank, file in enumerate(self.files):
            file.parent.mkdir(parents=True)
            ids = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            variables = {name: str(value) for name, value in ids.items()}
            variables["TORCHELASTIC_ERROR_FILE"] = str(file)
            env = without_launcher(TORCHELASTIC_RUN_ID="none", **variables)
            self.processes.append(started(work, env=env))

    def end(self) -> tuple[list[int], list[str]]:
        """Exit codes and stderrs by rank."""
        errors = [process.communicate(timeout=60)[1] for process in self.processes]
        return [process.returncode for process in self.processes], errors

    def reason(self, rank: int) -> str:
        """The reason in the error file of a rank, which torchrun's report shows."""
        return json.loads(self.files[rank].read_text())["message"]["extraInfo"]["py_callstack"]


class TestErrors:
    def test_of_all_ranks_is_printed_by_the_first(self, tmp_path):
        """Also if the first one fails last; the others exit with 0 and are not reported."""
        work = "time.sleep(1 - rank / 4)\nraise ValueError('--lr is\\n   wrong')"
        job = Job(tmp_path, work, 4)
        codes, errors = job.end()
        assert errors == ["it.py: error: --lr is wrong\n", "", "", ""]
        assert codes == [2, 0, 0, 0]
        assert job.reason(0) == "it.py: error: --lr is wrong"

    def test_of_one_rank_is_printed_by_it(self, tmp_path):
        work = "import console.errors as e; e._WAIT_FOR_FIRST = 0.5\n"
        work += "if rank == 1: raise OSError('no disk')\ntime.sleep(1.5)"
        job = Job(tmp_path, work, 2)
        codes, errors = job.end()
        assert (codes, errors) == ([0, 1], ["", "it.py: error (rank 1): no disk\n"])
        assert job.reason(1) == "it.py: error (rank 1): no disk"

    def test_of_the_first_rank_alone(self, tmp_path):
        """The others, which would wait for it, exit before torchrun ends and reports them."""
        job = Job(tmp_path, "if not rank: raise ValueError('x')\ntime.sleep(30)", 3)
        assert job.end() == ([2, 0, 0], ["it.py: error: x\n", "", ""])
        assert all(file.exists() for file in job.files)

    def test_ranks_of_a_process_group_are_left_to_torchrun(self, tmp_path):
        """They may be saving, which an error of the first rank must not interrupt."""
        met = "import types\nnamed = 'torch.distributed.distributed_c10d'\n"
        met += "sys.modules[named] = types.SimpleNamespace(is_initialized=lambda: True)\n"
        work = (
            "if not rank: time.sleep(1); raise ValueError('x')\ntime.sleep(3)\nprint(os.getpid())"
        )
        job = Job(tmp_path, met + work, 2)
        assert job.end() == ([2, 0], ["it.py: error: x\n", ""])
        assert not job.files[1].exists()

    def test_without_torchrun(self):
        process = started("raise ValueError('x')")
        assert process.communicate() == ("", "it.py: error: x\n")
        assert process.returncode == 2

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (ValueError, 2),
            (OSError, 1),
            (FloatingPointError, 1),
            (Failure, 1),
            (KeyboardInterrupt, 130),
        ],
    )
    def test_codes(self, error, code, capsys, monkeypatch):
        monkeypatch.delenv("RANK", raising=False)

        def work():
            raise error("reason")

        assert run_script("it.py", work) == code
        said = "interrupted" if error is KeyboardInterrupt else "error: reason"
        assert capsys.readouterr().err == f"it.py: {said}\n"

    def test_unexpected_errors_keep_their_traceback(self):
        with pytest.raises(ZeroDivisionError):
            run_script("it.py", lambda: 1 // 0)

    def test_a_closed_pipe(self):
        """As in ``it.py | head -1``."""
        process = started("for _ in range(10**6): print('x' * 100)")
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 1


class TestSignals:
    def test_libraries_cannot_have_stacks_printed(self):
        """Megatron's inference wants them on Ctrl-C and SIGTERM."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        for number in numbers[:2]:
            faulthandler.unregister(number)  # Megatron may have registered it in another test

        def work():
            for number in numbers:
                faulthandler.register(number, file=sys.__stderr__)

        run_script("it.py", work)
        assert [faulthandler.unregister(number) for number in numbers] == [False, False, True]
        assert faulthandler.register.__name__ == "register"

    def test_ctrl_c(self):
        # Jobs that a shell has put into the background ignore it, and so do their children.
        heed = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
        process = started("print('ready', flush=True)\ntime.sleep(60)", **heed)
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "it.py: interrupted\n")
        assert process.returncode == 130


def ends(pid: int, seconds: float = 20) -> bool:
    """Whether a process, which need not be a child, ends in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


PARENT = """
import subprocess, sys
{start}
print(child.stdout.readline().strip(), flush=True)
child.wait()
"""


def orphan_of(start: str, **variables: str) -> int:
    """Start a process that starts a child, kill it by SIGKILL, and return the child's id."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(start=start)],
        env=without_launcher(PYTHONPATH=str(SCRIPTS), **variables),
        stdout=subprocess.PIPE,
        text=True,
    )
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    return child


class TestKilled:
    """By SIGKILL, which a process cannot pass on to its children."""

    SLEEP = "print(os.getpid(), flush=True)\ntime.sleep(300)"
    CHILD = f"child = subprocess.Popen({program(SLEEP)!r}, stdout=-1, text=True)"

    def test_a_rank_ends_with_its_launcher(self):
        assert ends(orphan_of(self.CHILD, TORCHELASTIC_RUN_ID="none"))

    def test_a_script_outlives_the_shell_that_started_it(self):
        """As with nohup: only torchrun takes a script with it."""
        child = orphan_of(self.CHILD)
        assert not ends(child, 1)
        os.kill(child, signal.SIGKILL)

    def test_what_scripts_start_ends_with_them(self):
        """The child itself does nothing for that."""
        command = [sys.executable, "-c", f"import os, time\n{self.SLEEP}"]
        start = "from console.parent import ends_with_this_process as bind\n"
        start += f"child = subprocess.Popen({command!r}, preexec_fn=bind(), stdout=-1, text=True)"
        assert ends(orphan_of(start))

    def test_too_late(self):
        """The parent ends before its child asks the kernel to be killed with it."""
        late = """
import os
from console.parent import ends_with_this_process
bind = ends_with_this_process()
# In a child of a child, whose parent is not the one that asked.
if not os.fork():
    pid = os.fork()
    if not pid:
        bind()
        os._exit(0)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
        env = without_launcher(PYTHONPATH=str(SCRIPTS))
        assert subprocess.run([sys.executable, "-c", late], env=env).returncode == 128 + 9
