"""Python programs that are forked behave as those that a new interpreter runs."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.support import needs
from tests.support.forked_python import fork_server, forks_python

pytestmark = needs.no_gpu

# Says what it is, and whether it is a new interpreter.
ABOUT = """\
import json, os, sys
print(json.dumps([sys.argv, sys.stdin.read(), os.getcwd(), os.environ.get("NAME"), os.getppid(),
    __name__, sys.path, sorted(name for name in sys.modules if name.split(".")[0] in (
    "absorbed_mla", "tests", "pytest", "console"))]))
print("an error", file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture(autouse=True)
def _forks():
    fork_server()
    with forks_python():
        yield


def python(*words: object, **more) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **more)


@pytest.mark.parametrize("flags", [(), ("-P",), ("-W", "ignore")], ids=str)
@pytest.mark.parametrize("kind", ["-c", "-m", "script"])
def test_as_a_new_interpreter(kind, flags, tmp_path, monkeypatch):
    (tmp_path / "about.py").write_text(ABOUT)
    words = {"-c": ("-c", ABOUT), "-m": ("-m", "about"), "script": (tmp_path / "about.py",)}[kind]
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    more = {
        "cwd": tmp_path,
        "input": "text",
        "env": {**os.environ, "NAME": "value", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    }
    forked = python(*flags, *words, "one", "--two", **more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", subprocess.Popen.__base__)
        new = python(*flags, *words, "one", "--two", **more)
    assert (forked.returncode, forked.stderr) == (new.returncode, new.stderr) == (3, "an error\n")
    assert forked.stdout == new.stdout


def test_processes_are_ones_own():
    """They are children, are killed, and leave nothing behind."""
    before = {*psutil.Process().children()}
    program = "import time; print('begun', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    assert {child.pid for child in {*psutil.Process().children()} - before} == {process.pid}
    assert process.poll() is None
    process.kill()
    assert process.wait() == -signal.SIGKILL and process.stdout.read() == ""
    process.stdout.close()
    assert {*psutil.Process().children()} == before


def test_ctrl_c():
    program = "import time; print('begun', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-1, text=True)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate()[1]
    assert process.returncode == -signal.SIGINT


def test_an_error_is_printed():
    done = python("-c", "1 / 0")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


def test_open_files_are_passed():
    ours, theirs = os.pipe()
    done = python("-c", f"import os; os.write({theirs}, b'text')", pass_fds=[theirs])
    os.close(theirs)
    assert done.returncode == 0 and os.read(ours, 10) == b"text"
    os.close(ours)


def test_other_commands_are_not_forked():
    done = subprocess.run(["sh", "-c", "echo $PPID"], capture_output=True, text=True)
    assert done.stdout.strip() == str(os.getpid())
    assert python("--version").stdout.startswith("Python 3")
